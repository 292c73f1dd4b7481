"""`atoll plan`: from job and fleet file to a table, a picture and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from atoll.coordinator.cli import plan
from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.timeline import COLOURS, timeline
from atoll.coordinator.planning.pipeline import Link, Pipeline, Simulation, StageTimes, Transfer, WorkKind
from atoll.coordinator.planning.simulator import simulate
from atoll.protocol.errors import JobError, PlacementError

JOB = """
model: {builtin: gpt, options: {layers: 4, width: 32, heads: 2, context: 16, vocabulary: 64}}
data: {random: {kind: tokens, vocabulary: 64}, sequence_length: 16}
training: {steps: 1, batch: 8, microbatch: 2}
"""
FLEET = """
peers:
  - {name: attic, threads: 2, memory: 4GiB}
  - {name: cellar, threads: 2, memory: 4GiB}
  - {name: moon, flops: 1k, memory: 4GiB}
links:
  - {between: [attic, cellar], bandwidth: 10Gbps, rtt: 0.1ms}
"""
SVG = "{http://www.w3.org/2000/svg}"

app = typer.Typer()
app.command()(plan.command)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return "job.yaml", "fleet.yaml"


def test_people_get_a_table_and_a_picture(files: tuple[str, str]) -> None:
    job, fleet = files
    result = CliRunner().invoke(app, [job, "--fleet", fleet, "--set", "plan.stages=2"], catch_exceptions=False)
    table, links, rest = result.output.split("\n\n", 2)
    rows = [line.split()[:2] for line in table.splitlines()]
    assert rows[0] == ["stage", "peer"]
    assert sorted(row[1] for row in rows[1:]) == ["attic", "cellar"]
    assert [line.split()[2:4] for line in links.splitlines()[1:]] == [["forward", "raw"], ["backward", "raw"]]
    assert "10 Gbit/s" in links
    assert "~" not in links
    assert "~ estimated  computing at every peer" in rest
    assert "predicted " in rest
    assert "tokens/s" in rest
    assert "bottleneck " in rest
    assert "one more peer like " in rest
    assert "moon: even the smallest part of the model takes it" in rest
    assert "a picture of the step is in plan.svg" in rest
    root = ElementTree.parse("plan.svg").getroot()
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert "0 · attic" in texts
    assert "seconds" in texts
    assert any(text.startswith("bottleneck: ") for text in texts)


def test_a_bandwidth_that_nobody_gave_is_marked(files: tuple[str, str]) -> None:
    job, fleet = files
    Path(fleet).write_text(FLEET.replace("bandwidth: 10Gbps, ", ""))
    words = [job, "--fleet", fleet, "--set", "plan.stages=2", "--set", "network.compression=raw"]
    people = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "~1 Gbit/s" in people
    assert "~ estimated  bandwidth of any two neighbours" in people
    links = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)["links"]
    assert [(link["direction"], link["codec"], link["estimated"]) for link in links] == [
        ("forward", "raw", True),
        ("backward", "raw", True),
    ]


def test_scripts_get_the_event_of_a_plan(files: tuple[str, str]) -> None:
    job, fleet = files
    result = CliRunner().invoke(app, [job, "--fleet", fleet, "--json"], catch_exceptions=False)
    answer = json.loads(result.stdout)
    assert answer["event"] == "plan"
    assert answer["predicted_tokens_per_second"] == pytest.approx(8 * 16 / answer["predicted_step_seconds"])
    first = answer["stages"][0]
    assert {"stage", "peers", "first", "last", "parameters", "predicted_memory_bytes"} <= set(first)
    assert first["predicted_memory_bytes"] <= first["allowed_memory_bytes"]
    assert first["estimated_compute"]
    assert "moon" in {spare["name"] for spare in answer["spares"]}
    assert answer["bottleneck_kind"] in ("compute", "filling")
    assert not Path("plan.svg").exists()


def test_the_size_of_a_microbatch_is_said_whoever_chose_it(files: tuple[str, str]) -> None:
    job, fleet = files
    given = CliRunner().invoke(app, [job, "--fleet", fleet], catch_exceptions=False).output
    assert "microbatch   2 samples, 4 microbatches a step" in given
    words = [job, "--fleet", fleet, "--set", "training.microbatch=auto", "--json"]
    chosen = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert chosen["microbatch"] * chosen["num_microbatches"] == 8
    assert chosen["microbatch"] > 2, "starting work takes longer than so small a model"


def test_failures_cost_speed(files: tuple[str, str]) -> None:
    words = [files[0], "--fleet", files[1], "--failures-per-hour", "60"]
    people = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "tokens/s with 60 failures an hour that void a step each" in people
    answer = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)
    assert answer["failures_per_hour"] == 60.0
    assert 0.9 < answer["goodput_tokens_per_second"] / answer["predicted_tokens_per_second"] < 0.95
    words[-1] = "1000000"
    people = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "goodput      0 tokens/s with 1e+06 failures an hour" in people


@pytest.mark.parametrize("flags", [[], ["--fleet", "fleet.yaml", "--against", "127.0.0.1:1"]])
def test_peers_come_from_one_place(files: tuple[str, str], flags: list[str]) -> None:
    with pytest.raises(UsageError, match=r"give the peers with either --fleet FLEET.yaml or --against HOST:PORT"):
        CliRunner().invoke(app, [files[0], *flags], catch_exceptions=False)


def test_stages_that_are_pinned_are_not_planned(files: tuple[str, str]) -> None:
    job, fleet = files
    pin = "plan.pin={0: [attic, moon], 1: [cellar]}"
    with pytest.raises(UsageError, match=r"plan\.pin of this job gives every stage to peers"):
        CliRunner().invoke(app, [job, "--fleet", fleet, "--set", pin], catch_exceptions=False)
    loose = CliRunner().invoke(app, [job, "--fleet", fleet, "--set", "plan.pin={}"], catch_exceptions=False)
    assert loose.exit_code == 0


def test_mistakes_are_sentences(files: tuple[str, str]) -> None:
    job, fleet = files
    with pytest.raises(JobError, match=r"cannot read the fleet file 'none.yaml'"):
        CliRunner().invoke(app, [job, "--fleet", "none.yaml"], catch_exceptions=False)
    Path(fleet).write_text("peers: [{name: attic, threads: 1, memory: 1MB}]")
    with pytest.raises(PlacementError, match="the model does not fit"):
        CliRunner().invoke(app, [job, "--fleet", fleet], catch_exceptions=False)


def step_of(kinds: int = 2) -> Simulation:
    stage = StageTimes(
        forward_seconds=1.0,
        backward_seconds=1.0,
        accumulate_seconds=1.0,
        update_seconds=0.5,
        finish_seconds=0.25,
        in_flight=2,
    )
    crossing = Transfer(num_bytes=1.0, bytes_per_second=10.0)
    links = (Link(forward=crossing, backward=crossing),) * (kinds - 1)
    return simulate(Pipeline(stages=(stage,) * kinds, links=links, num_microbatches=3), record=True)


def test_the_picture_has_a_bar_for_each_work() -> None:
    root = ElementTree.fromstring(timeline(["a <b>", "c"], step_of(), "a & b", ["x < y"]))
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    counted = {kind: sum(bar.get("fill") == colour for bar in bars) for kind, colour in COLOURS.items()}
    assert counted == {
        WorkKind.FORWARD: 6,
        WorkKind.BACKWARD: 6,
        WorkKind.ACCUMULATE: 6,
        WorkKind.UPDATE: 2,
        WorkKind.FINISH: 2,
        WorkKind.SEND_FORWARD: 3,
        WorkKind.SEND_BACKWARD: 3,
        WorkKind.EXCHANGE: 0,
        WorkKind.AVERAGE: 0,
    }
    assert {"a <b>", "a & b", "x < y", "seconds"} <= {text.text for text in root.iter(f"{SVG}text")}
    assert root.findtext(f"{SVG}title") == "a & b"


def test_the_legend_explains_each_colour_that_occurs_and_no_other() -> None:
    for lanes, sends in ((["a"], False), (["a", "b"], True)):
        root = ElementTree.fromstring(timeline(lanes, step_of(len(lanes)), "step"))
        texts = {text.text for text in root.iter(f"{SVG}text")}
        assert {"forward", "backward", "gradients of weights", "update"} <= texts
        assert ("sends activations" in texts) == sends
        assert ("sends gradients" in texts) == sends
        assert "sends shared parameters' gradients" not in texts


def test_everything_drawn_lies_within_the_picture_and_time() -> None:
    root = ElementTree.fromstring(timeline(["a", "b"], step_of(), "step"))
    width, height = (float(value) for value in root.attrib["viewBox"].split()[2:])
    for rect in root.iter(f"{SVG}rect"):
        left, top = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert 0 <= left <= left + float(rect.attrib["width"]) <= width + 0.01
        assert 0 <= top <= top + float(rect.attrib["height"]) <= height
    ticks = [
        float(text.text or "")
        for text in root.iter(f"{SVG}text")
        if text.get("text-anchor") == "middle" and "faint" in text.attrib["class"]
    ]
    assert ticks[0] == 0.0
    assert ticks == sorted(ticks)
    assert ticks[-1] <= step_of().step_seconds


def test_the_picture_suits_dark_screens_and_programs_without_style_sheets() -> None:
    drawn = timeline(["a" * 60], step_of(1), "step")
    assert "prefers-color-scheme: dark" in drawn
    root = ElementTree.fromstring(drawn)
    for shape in (*root.iter(f"{SVG}rect"), *root.iter(f"{SVG}text")):
        assert shape.get("fill"), "a program without style sheets draws it black"
    names = [
        text.text for text in root.iter(f"{SVG}text") if text.get("text-anchor") == "end" and (text.text or "").startswith("a")
    ]
    assert names == ["a" * 25 + "…"]
