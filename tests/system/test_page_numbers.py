"""Each number on the page, in a real browser, is the one that ``--json`` has: in tables, figures, curves and the timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from atoll.coordinator.cli.page.site import Site
from atoll.coordinator.cli.status import status_dict
from atoll.coordinator.events import EvaluationEvent
from atoll.protocol.v1.operator_pb2 import LinkStatus, PeerStatus, ReplanReply, SnapshotStatus, StageTimeline, StatusReply
from atoll.protocol.v1.session_pb2 import Span
from support.browser import browser_for_test
from support.events import step_event

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

STATUS = StatusReply(
    run="numbers",
    state="training",
    step=3,
    steps=9,
    generation=2,
    predicted_step_seconds=0.12345678901,
    measured_step_seconds=0.2345678901,
    safe_snapshot=SnapshotStatus(step=2, age_seconds=1.5),
    peers=[
        PeerStatus(
            name=name,
            state="ready",
            stage=stage,
            layers="first - last",
            resident_bytes=123_456_789 + stage,
            predicted_memory_bytes=98_765_431 + stage,
            measured_compute_seconds=0.0123456789,
            predicted_compute_seconds=0.0198765432,
            silent_seconds=1.987654321,
        )
        for stage, name in enumerate(("ann", "bob"))
    ],
    links=[
        LinkStatus(
            source="ann",
            target="bob",
            direction="forward",
            codec="int8",
            measured_seconds=0.0456789012,
            measured_bytes_per_second=1_234_567.891,
            predicted_bytes_per_second=2_345_678.912,
            bytes=34_567_891,
            raw_bytes=134_567_891,
            relative_error=0.00345678912,
            damage=0.000456789123,
        )
    ],
    timelines=[
        StageTimeline(
            peer=name,
            step=3,
            spans=[
                Span(what="forward", microbatch=0, begin_seconds=0.0123 + late, seconds=0.0456),
                Span(what="waiting for gradient", microbatch=0, begin_seconds=0.0579 + late, seconds=0.0234, peer="bob"),
                Span(what="backward", microbatch=0, begin_seconds=0.0813 + late, seconds=0.0912),
                Span(what="accumulate", microbatch=-1, begin_seconds=0.1725 + late, seconds=0.0107),
            ],
        )
        for name, late in (("ann", 0.0), ("bob", 0.0345))
    ],
)
LOSSES = (5.123456789, 4.3456789012, 4.123456789, 2.987654321)
EVENTS = [
    step_event(step, loss=loss, tokens=1000 + 7 * step, seconds=0.321 * step) for step, loss in enumerate(LOSSES, start=1)
]
EVALUATIONS = [EvaluationEvent(step=2, loss=4.9876543210), EvaluationEvent(step=4, loss=2.3456789012)]
COLUMNS = {"peers": 5, "links": 7}
"""How many cells of a row have numbers."""


class Desk:
    """Stands still, so that there is one truth."""

    def status(self, *, timelines: bool = False) -> StatusReply:
        return STATUS

    def stop(self, reason: str) -> None: ...

    async def replan(self) -> ReplanReply:
        return ReplanReply()


async def shown(page: Page, selector: str) -> list[dict[str, Any]]:
    """The numbers of the elements there, by name, as exact as the page has them."""
    found: list[list[list[str]]] = await page.evaluate(
        "(where) => [...document.querySelectorAll(where)].map((row) =>"
        " [...row.querySelectorAll('[data-name]')].map((one) => [one.dataset.name, one.dataset.value]))",
        selector,
    )
    return [{name: json.loads(value) for name, value in row} for row in found]


async def test_each_number_on_the_page_is_that_of_json(tmp_path: Path) -> None:
    site = Site(listen="127.0.0.1:0", state=tmp_path, steps=STATUS.steps)
    url = await site.start(Desk())
    try:
        async with browser_for_test() as browser:
            for event in (*EVENTS, *EVALUATIONS):
                site.event(event)
            page = await browser.new_page()
            await page.goto(url)
            await expect(page.locator("#links td")).not_to_have_count(0)
            await expect(page.locator("dd[data-name=step]")).to_have_count(1)
            await check_tables(page)
            await check_figures(page)
            await check_curves(page)
            await check_timeline(page)
    finally:
        await site.stop()


async def check_tables(page: Page) -> None:
    """A row for each peer and link of ``atoll status --json``."""
    said = json.loads(json.dumps(status_dict(STATUS)))
    for table, columns in COLUMNS.items():
        rows = [row for row in await shown(page, f"#{table} tr") if row]
        assert [len(row) for row in rows] == [columns] * len(said[table])
        for row, wanted in zip(rows, said[table], strict=True):
            assert row == {name: wanted[name] for name in row}


async def check_figures(page: Page) -> None:
    """Those of the last step's event, and of the status."""
    step, evaluation = json.loads(EVENTS[-1].to_json()), json.loads(EVALUATIONS[-1].to_json())
    assert await shown(page, "#figures") == [
        {
            "step": step["step"],
            "loss": step["loss"],
            "tokens/s": step["tokens_per_second"],
            "a step": step["seconds"],
            "validation loss": evaluation["loss"],
            "predicted": STATUS.predicted_step_seconds,
            "safe snapshot": STATUS.safe_snapshot.step,
        }
    ]


async def drawn(page: Page, selector: str, *names: str) -> list[list[float]]:
    """Attributes of the elements there, numbers all."""
    found: list[list[float]] = await page.evaluate(
        "([where, names]) => [...document.querySelectorAll(where)].map((one) =>"
        " names.flatMap((name) => one.getAttribute(name).split(/[ ,]/).map(Number)))",
        [selector, names],
    )
    return found


async def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = await page.evaluate(
        "(where) => [...document.querySelectorAll(where)].map((one) => one.textContent)", selector
    )
    return found


def scaled(values: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Where the values are between the first of ``ends`` and the last."""
    return [(value - ends[0]) / (ends[-1] - ends[0]) for value in values]


def as_scaled(values: Sequence[float], ends: Sequence[float]) -> Any:
    return pytest.approx(scaled(values, ends), abs=1e-6)


async def check_curves(page: Page) -> None:
    """Each point of a curve lies where the number of that step's event puts it, on axes that say what their ends are."""
    steps = [json.loads(event.to_json()) for event in EVENTS]
    evaluations = [json.loads(event.to_json()) for event in EVALUATIONS]
    for curve, name, others in (("loss", "loss", evaluations), ("throughput", "tokens_per_second", [])):
        every = sorted([*(one[name] for one in steps), *(one["loss"] for one in others)])
        ticks = await texts(page, f"#{curve} text[text-anchor=end]")
        assert [float(ticks[0]), float(ticks[4])] == pytest.approx([every[0], every[-1]], rel=0.005)
        lines = [one[1] for one in await drawn(page, f"#{curve} line.grid", "y1", "y2")]
        (line,) = await drawn(page, f"#{curve} polyline", "points")
        assert scaled(line[0::2], line[0::2]) == as_scaled([one["step"] for one in steps], [1, len(steps)])
        assert scaled(line[1::2], lines) == as_scaled([one[name] for one in steps], every)
        dots = await drawn(page, f"#{curve} circle", "cx", "cy")
        assert scaled([x for x, _ in dots], line[0::2]) == as_scaled([one["step"] for one in others], [1, len(steps)])
        assert scaled([y for _, y in dots], lines) == as_scaled([one["loss"] for one in others], every)


async def check_timeline(page: Page) -> None:
    """Each span begins and lasts, and says of itself, as ``/api/status`` has it."""
    stages = json.loads(json.dumps(status_dict(STATUS)))["timelines"]
    spans = [span for stage in stages for span in stage["spans"]]
    end = max(span["begin_seconds"] + span["seconds"] for span in spans)
    rectangles = await drawn(page, "#timeline rect", "x", "width")
    axis, right = (await drawn(page, "#timeline svg > text.quiet", "x"))[0][0], max(x + width for x, width in rectangles)
    for (x, width), span in zip(rectangles, spans, strict=True):
        moments = [span["begin_seconds"], span["begin_seconds"] + span["seconds"]]
        assert scaled([x, x + width], [axis, right]) == as_scaled(moments, [0.0, end])
    said = [f"{span['what']}{words_of(span)}: {1000 * span['seconds']:.1f} ms" for span in spans]
    assert await texts(page, "#timeline rect title") == said
    labels = await texts(page, "#timeline svg > text")
    assert labels == [*(stage["peer"] for stage in stages), "0", f"step {stages[0]['step']}", f"{end:.3g} s"]


def words_of(span: dict[str, Any]) -> str:
    """Of which microbatch, and from whom."""
    which = f" {span['microbatch']}" if span["microbatch"] >= 0 else ""
    return which + (f" from {span['peer']}" if span["peer"] else "")
