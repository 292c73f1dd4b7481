"""The coordinator's sessions over real gRPC: admission, leases, faults and losses, against peers that say what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from atoll.coordinator.events import PausedEvent, PeerEvent, ResumedEvent, StepEvent, VoidEvent
from atoll.coordinator.run.deadlines import Deadlines
from atoll.protocol.assignment import Assignment, assignment_from_bytes
from atoll.protocol.channel import PROTOCOL_VERSION, open_channel
from atoll.protocol.ids import Generation
from atoll.protocol.job import Job
from atoll.protocol.messages import Kind
from atoll.protocol.v1 import session_pb2, session_pb2_grpc
from support.coordinated import Coordinated, ScriptedPeer, coordinated, tiny_job

SETTLE = 0.05
SMALLEST = {"layers": 1}


@asynccontextmanager
async def scripted(run: Coordinated, *names: str, **join: Any) -> AsyncIterator[list[ScriptedPeer]]:
    """Scripted peers that have sent Join."""
    peers = [ScriptedPeer(run.address, name, **join) for name in names]
    try:
        yield peers
    finally:
        await asyncio.gather(*(peer.close() for peer in peers))


def assignment_of(peer: ScriptedPeer) -> Assignment:
    """The last assignment that the peer was given."""
    message = [arrived.message for arrived in peer.messages if arrived.message.key.kind is Kind.ASSIGNMENT][-1]
    return assignment_from_bytes(bytes(message.tensors[0].data))


def report_of(peer: ScriptedPeer, start: session_pb2.StartStep, loss: float = 1.0) -> session_pb2.StageReport:
    """An honest peer's report of a step, without its work."""
    graph = assignment_of(peer).graph
    shared = {name.name: name.uses[0].stage for name in graph.shared}
    norms = [
        session_pb2.SquaredNorm(parameter=spec.name, value=1.0)
        for spec in graph.parameters
        if shared.get(spec.name, graph.stage) == graph.stage
    ]
    losses = [session_pb2.MicrobatchLoss(microbatch=index, loss=loss) for index in range(start.num_microbatches)]
    return session_pb2.StageReport(
        generation=start.generation,
        step=start.step,
        losses=losses if graph.loss is not None else [],
        squared_norms=norms,
    )


async def load(peers: list[ScriptedPeer], generation: int = 1) -> None:
    """Every peer takes its assignment and is ready."""
    for peer in peers:
        await peer.takes(1)
        peer.say(ready=session_pb2.Ready(generation=generation))


@asynccontextmanager
async def speaking(peer: ScriptedPeer) -> AsyncIterator[None]:
    """The peer says all the time that it is there."""

    async def speak() -> None:
        while True:
            peer.say(progress=session_pb2.Progress(phase="idle"))
            await asyncio.sleep(0.2)

    task = asyncio.create_task(speak())
    try:
        yield
    finally:
        task.cancel()


def waiting_run(folder: Path) -> AbstractAsyncContextManager[Coordinated]:
    """A coordinator that waits for more peers than will come."""
    return coordinated(tiny_job(folder, options=SMALLEST), folder / "state", peers=0, min_peers=9)


@asynccontextmanager
async def with_peers(
    folder: Path, *names: str, job: Job | None = None, **settings: Any
) -> AsyncIterator[tuple[Coordinated, list[ScriptedPeer]]]:
    """A coordinator that waits for these scripted peers, with a small job of two stages when none is given."""
    job = job or tiny_job(folder, options=SMALLEST, plan={"stages": 2})
    settings = {"min_peers": len(names), **settings}
    async with coordinated(job, folder / "state", peers=0, **settings) as run, scripted(run, *names) as peers:
        yield run, peers


async def commit_first_step(peers: list[ScriptedPeer]) -> None:
    for peer in peers:
        peer.say(report=report_of(peer, await peer.hears("start")))
    for peer in peers:
        assert (await peer.hears("commit")).step == 1


async def test_a_peer_is_welcomed_with_the_name_of_the_run(tmp_path: Path) -> None:
    async with with_peers(tmp_path, "a", min_peers=2) as (run, (a,)):
        welcome = await a.hears("welcome")
        assert (welcome.run, welcome.name) == ("tiny", "a")
        await run.until_waiting("waits for 1 more peer to join (1 of 2 are here)")


async def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    async with coordinated(tiny_job(tmp_path, options=SMALLEST), tmp_path / "state", peers=0, min_peers=9) as run:
        async with scripted(run, "a") as (a,):
            await a.hears("welcome")
            async with speaking(a), scripted(run, "a") as (twin,):
                rejected = await twin.hears("rejected")
            assert "a peer named a is in the run already" in rejected.reason
            assert "--name" in rejected.reason
            assert not rejected.again
        async with scripted(run, "b", protocol_version=7, version="9.9") as (b,):
            reason = (await b.hears("rejected")).reason
            assert f"speaks protocol {PROTOCOL_VERSION}" in reason
            assert "the peer protocol 7 (atoll 9.9)" in reason
        async with scripted(run, "c", address="0.0.0.0:80") as (c,):
            assert "--advertise" in (await c.hears("rejected")).reason


async def test_a_process_that_comes_back_takes_its_own_place_at_once(tmp_path: Path) -> None:
    async with waiting_run(tmp_path) as run, scripted(run, "a", instance="x") as (a,):
        await a.hears("welcome")
        async with speaking(a), scripted(run, "a", instance="x") as (back,):
            await back.hears("welcome")
            assert (await a.hears("rejected")).again
            await run.until_told(PeerEvent, name="a", state="lost", reason="it has come back")
        assert [event.state for event in run.told(PeerEvent)][:3] == ["joined", "lost", "joined"]


async def test_a_peer_that_is_started_again_takes_the_place_of_one_that_says_nothing_more(tmp_path: Path) -> None:
    """Its machine went down, and nobody told the coordinator: long before the lease is over, which is a minute here."""
    async with waiting_run(tmp_path) as run, scripted(run, "a", instance="x") as (a,):
        await a.hears("welcome")
        async with scripted(run, "a", instance="y") as (anew,):
            a.say(progress=session_pb2.Progress(phase="idle"))  # its last word, which was on its way
            await anew.hears("welcome")
            assert (await a.hears("rejected")).again
        assert [event.state for event in run.told(PeerEvent)][:3] == ["joined", "lost", "joined"]


async def test_two_of_a_name_that_come_together_are_told_apart(tmp_path: Path) -> None:
    async with waiting_run(tmp_path) as run, scripted(run, "a", instance="x") as (a,):
        await a.hears("welcome")
        async with scripted(run, "a", instance="y") as (one,), scripted(run, "a", instance="z") as (other,):
            await run.until(lambda: all(peer.heard for peer in (one, other)))
            said = {peer.heard[0].WhichOneof("content") for peer in (one, other)}
            assert said == {"welcome", "rejected"}


async def test_a_session_must_begin_with_join(tmp_path: Path) -> None:
    async with (
        coordinated(tiny_job(tmp_path, options=SMALLEST), tmp_path / "state", peers=0) as run,
        open_channel(run.address) as channel,
    ):
        call = session_pb2_grpc.CoordinatorStub(channel).Session()
        await call.write(session_pb2.PeerMessage(ready=session_pb2.Ready(generation=1)))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_peer_that_breaks_the_protocol_is_lost_and_its_name_is_free(tmp_path: Path) -> None:
    async with coordinated(tiny_job(tmp_path, options=SMALLEST), tmp_path / "state", peers=0, min_peers=9) as run:
        async with scripted(run, "a") as (a,):
            await a.hears("welcome")
            a.say(join=session_pb2.Join(name="a"))
            assert "broke the protocol" in (await run.until_told(PeerEvent, state="lost")).reason
        async with scripted(run, "a") as (again,):
            await again.hears("welcome")


async def test_a_peer_that_leaves_is_not_lost_and_its_name_is_free(tmp_path: Path) -> None:
    async with with_peers(tmp_path, "a", min_peers=9) as (run, (a,)):
        await a.hears("welcome")
        a.say(leave=session_pb2.Leave(reason="Ctrl+C"))
        assert (await run.until_told(PeerEvent, name="a", state="left")).reason == "Ctrl+C"
        async with scripted(run, "a") as (again,):
            await again.hears("welcome")
            await run.until(lambda: a.closed)
            assert [(peer.name, peer.state) for peer in run.coordinator.status().peers] == [("a", "joined")]
        assert [event.state for event in run.told(PeerEvent)][:3] == ["joined", "left", "joined"]


async def test_a_silent_peer_is_lost_when_its_lease_ends(tmp_path: Path) -> None:
    async with with_peers(tmp_path, "a", min_peers=2, lease_seconds=0.6) as (run, (a,)):
        assert "nothing was heard from it for 0.6 s" in (await run.until_told(PeerEvent, state="lost")).reason
        # It is there after all, and told why it must join anew.
        assert (await a.hears("rejected")).again
        await run.until(lambda: a.closed)


async def test_a_loss_before_the_first_commit_leads_back_to_waiting(tmp_path: Path) -> None:
    async with with_peers(tmp_path, "a", min_peers=2) as (run, (a,)):
        async with scripted(run, "b") as (b,):
            await load([a, b])
            await a.hears("start")
        await run.until_waiting("asks for 2 stages, but only 1 peer joined; start 1 more")
        assert (await a.hears("void")).next_generation == 2
        async with scripted(run, "c") as (c,):
            await c.takes(1)
            assert assignment_of(c).generation > 2
            await run.until(lambda: assignment_of(a).generation == assignment_of(c).generation)
            assert [other.peer for other in assignment_of(a).neighbours] == ["c"]


async def test_a_loss_after_the_first_commit_leads_back_to_first_values(tmp_path: Path) -> None:
    async with with_peers(tmp_path, "a", min_peers=2) as (run, (a,)):
        async with scripted(run, "b") as (b,):
            await load([a, b])
            await commit_first_step([a, b])
        async with scripted(run, "c") as (c,):
            await c.takes(1)
            await run.until(lambda: min(assignment_of(a).generation, assignment_of(c).generation) > 1)
            for peer in (a, c):
                assert assignment_of(peer).committed_step == 0
                assert not assignment_of(peer).donors
            assert run.coordinator.status().step == 0


async def test_a_fault_voids_the_step_and_its_batches_come_again(tmp_path: Path) -> None:
    async with with_peers(tmp_path, "a", "b") as (run, peers):
        a, b = peers
        await load(peers)
        await b.hears("start")
        kind = session_pb2.Fault.FAULT_NOT_FINITE
        b.say(fault=session_pb2.Fault(generation=1, step=1, kind=kind, reason="stage 1 saw a NaN at step 1"))
        void = await a.hears("void")
        assert (void.step, void.next_generation) == (1, 2)
        assert run.told(VoidEvent) == [VoidEvent(step=1, reason="stage 1 saw a NaN at step 1", peer="b", stage=1)]
        await run.until_waiting("to drop step 1, void because stage 1 saw a NaN at step 1")
        for peer in peers:
            peer.heard.clear()
            peer.say(voided=session_pb2.Voided(generation=2, step=1))
        assert (await a.hears("start")).generation == 2
        await run.until(lambda: _batches(a, generation=2) == [(1, 0), (1, 1), (2, 0), (2, 1)])
        for peer in peers:
            peer.say(report=report_of(peer, await peer.hears("start")))
        assert (await run.until_told(StepEvent, step=1)).generation == 2


def _batches(peer: ScriptedPeer, generation: int) -> list[tuple[int, int]]:
    keys = [arrived.message.key for arrived in peer.messages if arrived.message.key.kind is Kind.BATCH]
    return [(key.step, key.microbatch) for key in keys if key.generation == Generation(generation)]


async def test_each_stage_gets_the_inputs_it_uses_and_the_sizes(tmp_path: Path) -> None:
    async with with_peers(tmp_path, "a", "b") as (run, peers):
        await load(peers)
        await run.until(lambda: all(len(_batches(peer, generation=1)) == 4 for peer in peers))
        for peer, inputs in zip(peers, (["tokens"], ["targets"]), strict=True):
            batch = next(one.message for one in peer.messages if one.message.key.kind is Kind.BATCH)
            assert [tensor.name for tensor in batch.tensors] == inputs
            assert batch.numbers["scale"] == 0.5
            assert 2.0 in [value for name, value in batch.numbers.items() if name.startswith("size:")]


async def test_the_status_follows_the_chain_to_the_peer_that_all_wait_for(tmp_path: Path) -> None:
    async with with_peers(tmp_path, "a", "b") as (run, peers):
        a, b = peers
        await load(peers)
        await b.hears("start")
        a.say(progress=session_pb2.Progress(generation=1, step=1, phase="backward", waiting_for="b", resident_bytes=7))
        b.say(progress=session_pb2.Progress(generation=1, step=1, phase="forward"))
        await run.until_waiting("waits for b (stage 1, forward) in step 1")
        status = run.coordinator.status()
        assert [(peer.phase, peer.waiting_for) for peer in status.peers] == [("backward", "b"), ("forward", "")]
        assert status.peers[0].resident_bytes == 7


async def test_a_step_past_its_deadline_is_void(tmp_path: Path) -> None:
    deadlines = Deadlines(settle_seconds=SETTLE, step_seconds=0.5)
    async with with_peers(tmp_path, "a", "b", deadlines=deadlines) as (run, peers):
        await load(peers)
        start = await peers[0].hears("start")
        peers[0].say(report=report_of(peers[0], start))
        void = await run.until_told(VoidEvent)
        assert (void.peer, void.stage) == ("b", 1)
        assert void.reason.startswith("it did not do its part of the step in ")


async def test_a_peer_that_does_not_load_is_told_and_the_run_goes_on_without_it(tmp_path: Path) -> None:
    deadlines = Deadlines(settle_seconds=SETTLE, loading_seconds=0.8)
    # As many stages as there are peers: two at first, then one.
    async with with_peers(tmp_path, "a", "b", job=tiny_job(tmp_path), min_peers=1, deadlines=deadlines) as (_, (a, b)):
        await a.takes(1)
        assert assignment_of(a).graph.num_stages == 2
        a.say(ready=session_pb2.Ready(generation=1))
        assert "did not load its stage in time" in (await b.hears("rejected")).reason
        await a.takes(2)
        assert assignment_of(a).graph.num_stages == 1


async def test_a_model_that_does_not_fit_pauses_until_one_more_joins(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, optimizer={"name": "sgd"}, options=SMALLEST)
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=1) as run, scripted(run, "a", memory_bytes=150_000):
        assert "more memory needed" in (await run.until_told(PausedEvent)).reason
        await run.until_waiting("is paused: the model does not fit")
        async with scripted(run, "b"):
            await run.until_told(ResumedEvent)
