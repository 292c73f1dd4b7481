"""`atoll plan --against`: the peers that are connected, with all that is known of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.coordinator.cli import plan
from atoll.coordinator.cli.exits import ExitStatus
from atoll.coordinator.cli.plan_answer import lines
from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.events import PeerEvent
from atoll.coordinator.fleet_report import measured_in, network_in, offers_in
from atoll.coordinator.survey.segment_measuring import prepare_measuring
from atoll.coordinator.traced_model import trace_model
from atoll.protocol.job import Job, dump_job
from atoll.protocol.v1.operator_pb2 import FleetLink, FleetPeer, FleetReply
from atoll.protocol.v1.session_pb2 import Measured
from support.coordinated import Coordinated, coordinated, tiny_job
from support.swarm import run_command


async def connected(run: Coordinated, *names: str) -> None:
    for name in names:
        await run.until_told(PeerEvent, name=name, state="joined")


async def test_connected_peers_are_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.peer.measuring.profile.free_memory_bytes", lambda device: 10**9)
    job = tiny_job(tmp_path, plan={"stages": 2})
    path = tmp_path / "job.yaml"
    path.write_text(dump_job(job))
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=3) as run:
        # As a process: a coordinator traces in this one, and torch traces one model at a time.
        words = ("plan", path, "--against", tmp_path / "state", "--json")
        refused = await run_command(*words)
        assert refused.status == ExitStatus.USAGE
        assert f"no peer has joined {tmp_path / 'state'}; start one" in refused.errors
        run.join("attic", "cellar", max_upload=2.5e6)
        await connected(run, "attic", "cellar")
        planned = await run_command(*words)
    assert planned.status == ExitStatus.FINISHED, planned.errors
    answer = json.loads(planned.output)
    stages, links = answer["stages"], answer["links"]
    assert sorted(stage["peers"][0] for stage in stages) == ["attic", "cellar"]
    assert [stage["allowed_memory_bytes"] for stage in stages] == [9 * 10**8] * 2
    assert all(0 < link["bytes_per_second"] <= 2.5e6 for link in links), "the owners' caps"


def reply_for(job: Job, folder: Path, seconds: float) -> FleetReply:
    """Two peers who measured every part of the job, forward in ``seconds`` each."""
    feed = open_feed(job, folder / "cache")
    kinds = prepare_measuring(trace_model(job, feed), feed).fingerprints
    measured = [
        Measured(
            kind=kind, forward_seconds=seconds, backward_seconds=seconds, accumulate_seconds=seconds, update_seconds=seconds
        )
        for kind in kinds
    ]
    peers = [
        FleetPeer(name=name, flops_per_second=1e9, memory_bytes=10**9, machine=name, cores=1, threads=1, measured=measured)
        for name in ("attic", "cellar")
    ]
    links = [
        FleetLink(source=one, target=other, bytes_per_second=1e9, latency_seconds=1e-3)
        for one, other in (("attic", "cellar"), ("cellar", "attic"))
    ]
    return FleetReply(peers=peers, links=links)


def test_what_peers_measured_replaces_the_estimate(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, plan={"stages": 2})
    reply = reply_for(job, tmp_path, seconds=0.25)
    known = plan.Known(offers=offers_in(reply), network=network_in(reply), measured=measured_in(reply))
    answer = plan.make_answer(job, known)
    assert not any(stage.estimated_compute for stage in answer.forecasts)
    assert not any(link.estimated for link in answer.links)
    assert "~" not in "\n".join(lines(answer))
    for stage in answer.planned.seats:
        # Each part takes 0.25 s forward, backward and for its weights; starting work adds a little.
        assert stage.compute_seconds == pytest.approx(0.75 * (stage.end - stage.first), rel=0.1)


def test_what_was_measured_of_another_job_does_not_count(tmp_path: Path) -> None:
    other = tiny_job(tmp_path, options={"width": 32})
    reply = reply_for(other, tmp_path, seconds=0.25)
    known = plan.Known(offers=offers_in(reply), network=network_in(reply), measured=measured_in(reply))
    answer = plan.make_answer(tiny_job(tmp_path, plan={"stages": 2}), known)
    assert all(stage.estimated_compute for stage in answer.forecasts)
    assert answer.planned.step_seconds < 0.75
