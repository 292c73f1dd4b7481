"""What a coordinator has its peers measure before a plan, over real gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.coordinator.events import MeasurementEvent, PlanEvent, StepEvent
from atoll.coordinator.survey.survey_plan import SurveyLimits
from atoll.protocol.v1 import operator_pb2, session_pb2
from support.coordinated import CANNOT, Coordinated, ScriptedPeer, coordinated, tiny_job

PATIENT = SurveyLimits(kind_seconds=60.0, probe_seconds=1.0)
SHORT = SurveyLimits(kind_seconds=3.0, probe_seconds=0.3, answer_seconds=0.2)


async def fleet_of(run: Coordinated) -> operator_pb2.FleetReply:
    async with run.operator() as operator:
        reply: operator_pb2.FleetReply = await operator.Fleet(operator_pb2.FleetRequest())
        return reply


async def test_peers_that_cannot_measure_are_planned_by_estimate_and_that_is_said(tmp_path: Path) -> None:
    async with coordinated(tiny_job(tmp_path), tmp_path / "state", peers=0, min_peers=2) as run:
        peers = [ScriptedPeer(run.address, name) for name in "ab"]
        await run.until_told(PlanEvent)
        told = run.told(MeasurementEvent)
        assert [(event.peer, event.reason) for event in told if event.what == "segments"] == [("a", CANNOT), ("b", CANNOT)]
        links = {(event.peer, event.target): event for event in told if event.what == "link"}
        assert {("a", "b"), ("b", "a"), ("a", "the coordinator")} <= links.keys()
        assert all(event.estimated and CANNOT in event.reason for event in told)
        assert links["a", "b"].bytes_per_second is not None
        # Every kind was asked of each, and none twice.
        assert len(set(peers[0].asked_to_measure)) == len(peers[0].asked_to_measure) >= 2
        assert peers[0].asked_to_measure == peers[1].asked_to_measure
        status = {peer.name: peer.measurement for peer in run.coordinator.status().peers}
        assert status == {"a": f"estimated: {CANNOT}", "b": f"estimated: {CANNOT}"}
        fleet = await fleet_of(run)
        assert [len(peer.measured) for peer in fleet.peers] == [0, 0]
        assert all(link.estimated for link in fleet.links)
        for peer in peers:
            await peer.close()


async def test_a_silent_peer_does_not_hold_up_the_run(tmp_path: Path) -> None:
    async with coordinated(tiny_job(tmp_path), tmp_path / "state", peers=0, min_peers=2, survey=SHORT) as run:
        peers = [ScriptedPeer(run.address, "a", machine="one"), ScriptedPeer(run.address, "b", surveyed=False, machine="two")]
        await run.until_waiting("measures the layers on b")
        await run.until_told(PlanEvent)
        reasons = {event.peer: event.reason for event in run.told(MeasurementEvent) if event.what == "segments"}
        assert reasons == {"a": CANNOT, "b": "it did not answer within 3 s"}
        for peer in peers:
            await peer.close()


async def test_what_a_peer_measured_is_planned_with(tmp_path: Path) -> None:
    async with coordinated(tiny_job(tmp_path), tmp_path / "state", peers=0, min_peers=2, survey=PATIENT) as run:
        slow, fast = (
            ScriptedPeer(run.address, name, surveyed=False, works_seconds=seconds, machine=name)
            for name, seconds in (("slow", 9.0), ("fast", 0.001))
        )
        probe = await fast.hears("probe")
        probed = session_pb2.Probed(
            number=probe.number, round_trip_seconds=0.02, upload_bytes_per_second=1e6, download_bytes_per_second=2e6
        )
        fast.say(probed=probed)
        plan = await run.until_told(PlanEvent)
        assert [stage.peers for stage in plan.stages] == [("fast",)], "the slow one would only hold it up"
        measured = [event for event in run.told(MeasurementEvent) if event.what == "segments"]
        assert [(event.peer, event.estimated) for event in measured] == [("fast", False), ("slow", False)]
        assert measured[1].forward_seconds is not None
        assert measured[1].forward_seconds > len(slow.asked_to_measure) * 9.0, "segments of a kind count each"
        fleet = await fleet_of(run)
        assert all(len(peer.measured) == len(fast.asked_to_measure) for peer in fleet.peers)
        for peer in (slow, fast):
            await peer.close()


async def test_real_peers_measure_themselves_and_their_links_and_predictions_follow(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=10_000, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=2) as run:
        run.join("a", "b", flops_per_second=None, cache=tmp_path / "cache")
        await run.until_told(StepEvent, step=3)
        told = run.told(MeasurementEvent)
        assert {event.peer for event in told if event.what == "segments" and not event.estimated} == {"a", "b"}
        links = {(event.peer, event.target) for event in told if event.what == "link" and not event.estimated}
        assert {("a", "b"), ("b", "a")} <= links
        async with run.operator() as operator:
            status = await operator.Status(operator_pb2.StatusRequest())
        assert status.predicted_step_seconds == pytest.approx(run.told(PlanEvent)[-1].predicted_step_seconds)
        assert status.measured_step_seconds > 0.0
        assert [peer.measurement for peer in status.peers] == ["measured", "measured"]
        assert all(peer.predicted_compute_seconds > 0.0 and peer.measured_compute_seconds > 0.0 for peer in status.peers)
        assert {(link.source, link.target) for link in status.links} == {("a", "b"), ("b", "a")}
        assert all(not link.estimated and link.round_trip_seconds > 0.0 for link in status.links)
        fleet = await fleet_of(run)
        assert all(peer.measured and all(kind.forward_seconds > 0.0 for kind in peer.measured) for peer in fleet.peers)
        assert not any(link.estimated for link in fleet.links)


async def test_a_newcomer_alone_is_asked_before_the_next_plan(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=2) as run:
        first, second = (ScriptedPeer(run.address, name) for name in "ab")
        await run.until_told(PlanEvent, generation=1)
        kinds = len(first.asked_to_measure)
        await second.close()  # before the first step, so the run plans anew
        third = ScriptedPeer(run.address, "c")
        await run.until(lambda: len(run.told(PlanEvent)) > 1)
        assert len(first.asked_to_measure) == kinds
        assert len(third.asked_to_measure) == kinds
        for peer in (first, third):
            await peer.close()
