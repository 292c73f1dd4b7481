"""Two peers on hosts that accept no connection train together through the coordinator, to the bits of one process, also when
one of them is killed meanwhile; prints what their traffic gets of the relay's link."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.coordinator.events import StepEvent
from atoll.coordinator.survey.probe_results import THE_COORDINATOR
from atoll.protocol.job import load_job
from support.coordinated import coordinated
from support.hosts import HostedRun, closed_hosts_for_test, hosted_run
from support.swarm import write_job

pytestmark = [pytest.mark.system, pytest.mark.hosts, pytest.mark.timeout(300)]

STEPS, KILLED_AT = 24, 8
RUN_SECONDS = 240.0


def job_of(folder: Path) -> Path:
    """Half a megabyte crosses the cut for each microbatch, both ways: the link is what steps wait for."""
    training = {"steps": STEPS, "batch": 16, "microbatch": 4, "evaluate_every": None}
    options = {"layers": 2, "width": 256, "heads": 2, "context": 128}
    network = {"compression": {"forward": "raw", "backward": "raw"}}
    model = {"builtin": "gpt", "options": options}
    return write_job(folder, model=model, training=training, data={"sequence_length": 128}, plan={"stages": 2}, network=network)


async def test_peers_behind_closed_hosts_train_through_the_coordinator_and_survive_a_kill(tmp_path: Path) -> None:
    coordinator, one, other = await closed_hosts_for_test(2)
    job = job_of(tmp_path)
    async with hosted_run(job, tmp_path / "state", coordinator, [one, other]) as run:
        await run.event("step", step=KILLED_AT)
        await run.kill(other.name)
        await run.event("peer", name=other.name, state="lost")
        await run.join(other)
        assert (await run.event("finished", within_seconds=RUN_SECONDS))["steps"] == STEPS
        assert await run.ended() == 0
    missed = [event["reason"] for event in run.events if "no connection" in event.get("reason", "")]
    assert not missed, "a peer was dialled where it accepts nothing"
    found = {event["step"]: event["loss"] for event in run.events if event["event"] == "step"}
    async with coordinated(load_job(job), tmp_path / "undisturbed", peers=2) as reference:
        assert (await reference.ended()).finished
        assert found == {event.step: event.loss for event in reference.told(StepEvent)}
    told = (tmp_path / "state" / "logs" / "coordinator.log").read_text()
    pairs = (f"{one.name} - {other.name}", f"{other.name} - {one.name}")
    assert any(f"the link {pair} (through the coordinator)" in told for pair in pairs)
    print_rates(run, one.name, other.name)


def print_rates(run: HostedRun, one: str, other: str) -> None:
    """What traffic between the two has got, beside what each of the two links of which the way consists carries alone."""
    links: dict[tuple[str, str], float] = {}
    for item in run.events:
        if item["event"] == "measurement" and item["what"] == "link" and item["bytes_per_second"]:
            pair = item["peer"], item["target"]
            links[pair] = max(links.get(pair, 0.0), item["bytes_per_second"])
    for source, target in ((one, other), (other, one)):
        got = [
            item["measured"]
            for item in run.events
            if item["event"] == "prediction"
            and (item["what"], item["peer"], item["target"]) == ("bytes_per_second", source, target)
            and item["measured"]
        ]
        allowed = min(links[source, THE_COORDINATOR], links[THE_COORDINATOR, target])
        share = ", ".join(f"{rate / allowed:.2f}" for rate in got)
        probed = links[source, target] / allowed
        print(f"{source} to {target}, of {allowed / 1e6:.2f} MB/s: a probe {probed:.2f}; training {share}")
