"""Peers that come all at once: one plan, each layer once, and the same plan whoever was first."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.events import PeerEvent, PlanEvent
from atoll.coordinator.run.deadlines import Deadlines
from atoll.coordinator.traced_model import trace_model
from atoll.protocol.assignment import Assignment, assignment_from_bytes
from atoll.protocol.job import Job
from atoll.protocol.messages import Kind
from support.coordinated import Coordinated, ScriptedPeer, coordinated, tiny_job

NUM_STAGES = 5
SPEEDS = {f"peer-{number}": 1e9 * (1.0 + 0.3 * (number * 5 % 8)) for number in range(8)}
"""All different, and in another order than the names."""


async def arrivals(job: Job, state: Path, names: list[str]) -> tuple[PlanEvent, dict[str, Assignment], list[str]]:
    """The plan of a run whose peers open their sessions in the order of ``names``, none waiting for another; what each peer
    was assigned; and the order in which they were admitted."""
    # They come together on any machine: nobody is planned for before all have been let in, and then nobody else comes.
    deadlines = Deadlines(settle_seconds=0.3)
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(coordinated(job, state, peers=0, min_peers=8, deadlines=deadlines))
        peers = {name: ScriptedPeer(run.address, name, flops_per_second=SPEEDS[name]) for name in names}
        stack.push_async_callback(close, list(peers.values()))
        plan = await run.until_told(PlanEvent)
        holders = [peer for stage in plan.stages for peer in stage.peers]
        await asyncio.gather(*(peers[name].takes(1) for name in holders))
        assert {name for name in names if peers[name].messages} == set(holders)
        assert run.told(PlanEvent) == [plan]
        return plan, {name: assignment_of(peers[name]) for name in holders}, joined(run)


def assignment_of(peer: ScriptedPeer) -> Assignment:
    (message,) = [arrived.message for arrived in peer.messages if arrived.message.key.kind is Kind.ASSIGNMENT]
    return assignment_from_bytes(bytes(message.tensors[0].data))


def joined(run: Coordinated) -> list[str]:
    return [event.name for event in run.told(PeerEvent) if event.state == "joined"]


async def close(peers: list[ScriptedPeer]) -> None:
    await asyncio.gather(*(peer.close() for peer in peers))


async def test_eight_peers_in_one_tick_get_one_plan_whoever_comes_first(tmp_path: Path) -> None:
    """Row 20: simultaneous joiners never take the same layers."""
    job = tiny_job(tmp_path, options={"layers": 6, "tied": False}, plan={"stages": NUM_STAGES})
    names = sorted(SPEEDS)
    orders = [names, names[::-1], random.Random(20).sample(names, len(names))]
    results = [await arrivals(job, tmp_path / str(number), order) for number, order in enumerate(orders)]
    assert len({tuple(admitted) for _, _, admitted in results}) > 1, "the orders must differ for this to be a test"
    model = trace_model(job, open_feed(job, tmp_path / "cache"))
    for plan, assignments, admitted in results:
        assert sorted(admitted) == names
        assert len(plan.stages) == len(assignments) == NUM_STAGES
        held = Counter(spec.name for one in assignments.values() for spec in one.graph.parameters)
        assert held == Counter(spec.name for spec in model.graph.parameters), "each parameter on one peer, none on two"
        assert sorted(one.graph.stage for one in assignments.values()) == list(range(NUM_STAGES))
    first = results[0]
    for plan, assignments, _ in results[1:]:
        assert plan == first[0]
        assert {name: one.graph for name, one in assignments.items()} == {name: one.graph for name, one in first[1].items()}
