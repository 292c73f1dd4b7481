"""Peers that leave a run of real peers in order: nothing is lost, and nobody notices in the numbers."""

from __future__ import annotations

from pathlib import Path

from atoll.coordinator.events import MovedEvent, PeerEvent, PlanEvent, StepEvent, VoidEvent
from atoll.peer.session.values import ExitCode
from atoll.protocol.v1 import operator_pb2
from support.coordinated import Coordinated, coordinated, tiny_job

STEPS = 300
SMALL = {"layers": 1}


async def losses(folder: Path) -> list[tuple[float, float]]:
    """Of the undisturbed run."""
    job = tiny_job(folder, options=SMALL, steps=STEPS, plan={"stages": 2})
    async with coordinated(job, folder / "undisturbed", peers=2) as run:
        assert (await run.ended()).finished
        return committed(run)


def committed(run: Coordinated) -> list[tuple[float, float]]:
    return [(event.loss, event.grad_norm) for event in run.told(StepEvent)]


async def test_a_stage_is_handed_over_without_a_void_and_the_numbers_stay(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, options=SMALL, steps=STEPS, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=3) as run:
        await run.until_told(StepEvent, step=2)
        (first, *_) = run.told(PlanEvent)[0].stages
        (leaver,) = first.peers
        run.peer(leaver).leave_in_order("told to end")
        outcome = await run.peer_ended(leaver)
        assert (outcome.exit_code, outcome.reason) == (ExitCode.FINISHED, "told to end; nothing is lost with this peer")
        assert (await run.ended()).finished
        assert leaver not in [peer for stage in run.told(PlanEvent)[-1].stages for peer in stage.peers]
        assert not run.told(VoidEvent)
        assert [event.reason for event in run.told(PeerEvent) if event.state == "left"] == ["told to end"]
        (moved,) = run.told(MovedEvent)
        assert moved.reason.startswith(f"{leaver} leaves: ")
        found = committed(run)
    assert found == await losses(tmp_path)


async def test_the_operator_removes_a_peer_which_may_join_again_when_allowed(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, options=SMALL, steps=60, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=3) as run, run.operator() as stub:
        await run.until_told(StepEvent, step=2)
        (leaver,) = run.told(PlanEvent)[0].stages[1].peers
        request = operator_pb2.RemovePeerRequest(name=leaver, hand_over_seconds=30.0)
        assert (await stub.RemovePeer(request)).was_here
        outcome = await run.peer_ended(leaver)
        assert outcome.exit_code == ExitCode.FAILED
        assert f"removed by the operator: have the operator run `atoll peers allow {leaver}`" in outcome.reason
        run.join(leaver)
        assert "the operator removed" in (await run.peer_ended(leaver)).reason
        assert (await stub.AllowPeer(operator_pb2.AllowPeerRequest(name=leaver))).was_barred
        assert not (await stub.AllowPeer(operator_pb2.AllowPeerRequest(name=leaver))).was_barred
        told_before = len(run.told(PeerEvent))  # it was a spare when it had handed its layers over, too
        run.join(leaver)
        await run.until(
            lambda: any((event.name, event.state) == (leaver, "spare") for event in run.told(PeerEvent)[told_before:]),
            "it was not let in again",
        )
        assert not (await stub.RemovePeer(operator_pb2.RemovePeerRequest(name="nobody"))).was_here
        assert not run.told(VoidEvent)


async def test_when_nobody_can_take_over_the_peer_is_told_and_stays_for_its_time(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, options=SMALL, steps=400, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=2) as run:
        await run.until_told(StepEvent, step=2)
        run.peer("peer-0").leave_in_order("told to end")
        await run.until(lambda: any("it leaves" in event.reason for event in run.told(PeerEvent)), "nobody heard of it")
        run.join("peer-2")
        outcome = await run.peer_ended("peer-0")
        assert outcome.reason == "told to end; nothing is lost with this peer"
        assert not run.told(VoidEvent)
