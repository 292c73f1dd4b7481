"""What goes wrong in a step: it is named, voided, run again, and the numbers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from atoll.peer.session.values import ExitCode
from atoll.protocol.graph import OpGraph, StageGraph, TensorSpec, ValueReference
from atoll.protocol.ids import Generation
from atoll.protocol.v1 import session_pb2 as pb
from support.hand_graphs import BATCH, GraphBuilder
from support.hand_models import convolutional, transformer
from support.hand_run import HandRun, RunSettings, assert_equal, in_one_process, samples_of, send_assignment, swarm
from support.pipelines import Sample
from support.waiting import assert_eventually


def changed(sample: Sample, name: str, value: float) -> Sample:
    """The same sample with one element of one input replaced."""
    tensor = sample.inputs[name].clone()
    tensor.view(-1)[0] = value
    return replace(sample, inputs={**sample.inputs, name: tensor})


async def test_a_value_that_is_not_finite_voids_the_step_and_is_named() -> None:
    model = convolutional()
    steps = samples_of(model)
    alone = in_one_process(model, RunSettings())
    async with swarm("ann", "bob") as peers:
        seats = await peers.seats()
        run = HandRun(peers.coordinator, seats, model.graph, RunSettings())
        await run.load(model.cuts[1:2])
        assert await run.step(1, steps[0]) == alone.step(1, steps[0])
        before = await run.state(1)
        run.start(2, [steps[1][0], changed(steps[1][1], "images", float("nan")), steps[1][2]])
        fault = await seats[0].hears("fault")
        assert (fault.kind, fault.generation, fault.step, fault.accused) == (pb.Fault.FAULT_NOT_FINITE, 1, 2, "")
        assert "stage 0" in fault.reason
        assert "step 2" in fault.reason
        await run.void(2)
        assert_equal(await run.state(1), before)
        assert await run.step(2, steps[1]) == alone.step(2, steps[1])
        assert_equal(await run.state(2), alone.state())


async def test_voids_at_any_moment_leave_no_trace() -> None:
    model = transformer(tied=True, dropout=0.1)
    steps = samples_of(model)
    alone = in_one_process(model, RunSettings())
    async with swarm("ann", "bob", "cid") as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings())
        await run.load((model.cuts[1], model.cuts[3]))
        for number, samples in enumerate(steps, 1):
            for turns_of_the_loop in (0, 10, 50, 200):
                run.start(number, samples)
                for _ in range(turns_of_the_loop):
                    await asyncio.sleep(0)
                await run.void(number)
            run.start(number, samples)
            await run.reports(number)
            await run.void(number)
            assert await run.step(number, samples) == alone.step(number, samples)
        assert_equal(await run.state(), alone.state())


async def test_a_peer_may_hear_of_a_new_generation_after_its_neighbours() -> None:
    model = transformer()
    samples = samples_of(model)[0]
    async with swarm("ann", "bob") as peers:
        ann, bob = await peers.seats()
        run = HandRun(peers.coordinator, (ann, bob), model.graph, RunSettings())
        await run.load(model.cuts[2:3])
        run.start(1, samples)
        void = pb.Void(generation=1, step=1, next_generation=2)
        ann.tell(void=void)
        await ann.hears("voided")
        run.generation = Generation(2)
        start = pb.StartStep(generation=2, step=1, num_microbatches=len(samples))
        bob.tell(void=void)  # and the batches after it: bob's stream is in order
        run.send_batches(1, samples)
        ann.tell(start=start)
        await assert_eventually(lambda: (ann.progress.generation, ann.progress.phase) == (2, "waiting for gradient"))
        assert ann.progress.waiting_for == "bob"
        bob.tell(start=start)
        await run.reports(1)
        run.commit(1, 1.0, 1e-2)
        alone = in_one_process(model, RunSettings())
        alone.step(1, samples, clip_norm=None)
        assert_equal(await run.state(1), alone.state())


async def test_batches_of_the_next_step_may_come_early() -> None:
    model = transformer()
    steps = samples_of(model)
    alone = in_one_process(model, RunSettings())
    async with swarm("ann", "bob") as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings())
        await run.load(model.cuts[2:3])
        run.send_batches(2, steps[1])
        run.send_batches(2, steps[2], evaluation=True)
        assert await run.step(1, steps[0]) == alone.step(1, steps[0])
        for seat in run.seats:
            seat.tell(start=pb.StartStep(generation=1, step=2, num_microbatches=3))
        reports = await run.reports(2)
        assert {item.microbatch for report in reports for item in report.losses} == {0, 1, 2}
        run.commit(2, 1.0, 1e-2)
        alone.step(2, steps[1], clip_norm=None)
        assert_equal(await run.state(2), alone.state())


async def test_a_commit_waits_while_state_is_handed_out() -> None:
    model = transformer()
    steps = samples_of(model)
    alone = in_one_process(model, RunSettings())
    async with swarm("ann", "bob") as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings())
        await run.load(model.cuts[2:3])
        first = alone.state()
        run.start(1, steps[0])
        await run.reports(1)
        for seat in run.seats:
            seat.tell(store=pb.Store(generation=1, step=0))
        run.commit(1, 1.0, 1e-2)
        run.start(2, steps[1])
        found: dict[str, torch.Tensor] = {}
        for seat in run.seats:
            await seat.hears("stored")
            found |= seat.stored
        assert_equal(found, first)
        await run.reports(2)
        run.commit(2, 1.0, 1e-2)
        for number in (1, 2):
            alone.step(number, steps[number - 1], clip_norm=None)
        assert_equal(await run.state(2), alone.state())


async def test_data_that_the_graph_cannot_take_is_an_internal_fault_and_the_peer_lives() -> None:
    model = transformer()
    steps = samples_of(model)
    alone = in_one_process(model, RunSettings())
    async with swarm("ann") as peers:
        (seat,) = await peers.seats()
        run = HandRun(peers.coordinator, [seat], model.graph, RunSettings())
        await run.load()
        run.start(1, [changed(steps[0][0], "tokens", 10**6)])
        fault = await seat.hears("fault")
        assert fault.kind == pb.Fault.FAULT_INTERNAL
        assert "aten.embedding" in fault.reason
        await run.void(1)
        assert await run.step(1, steps[0]) == alone.step(1, steps[0])


def hungry_graph() -> OpGraph:
    """Needs rows x 2^20 elements: a terabyte for the 2^18 rows of the test."""
    build = GraphBuilder()
    rows = build.input("rows", BATCH, 1)
    weight = build.parameter("weight", 1, 1)
    wide = build.call("aten.expand.default", build.call("aten.linear.default", rows, weight), (BATCH, 2**20))
    return build.graph(build.call("aten.mean.default", build.call("aten.exp.default", wide)))


async def test_lack_of_memory_is_told_as_such_and_the_peer_lives() -> None:
    async with swarm("ann") as peers:
        (seat,) = await peers.seats()
        run = HandRun(peers.coordinator, [seat], hungry_graph(), RunSettings())
        await run.load()
        run.start(1, [Sample(inputs={"rows": torch.zeros(2**18, 1)})])
        fault = await seat.hears("fault")
        assert fault.kind == pb.Fault.FAULT_MEMORY
        await run.void(1)
        await run.step(1, [Sample(inputs={"rows": torch.zeros(2, 1)})])


def with_node(graph: StageGraph, index: int, **changes: object) -> StageGraph:
    """The graph with one node changed."""
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **changes)  # type: ignore[arg-type]  # whatever the test wants
    return replace(graph, nodes=tuple(nodes))


def forbidden_operator(graph: StageGraph) -> StageGraph:
    return with_node(graph, 3, operator="aten.from_file.default")


def circle(graph: StageGraph) -> StageGraph:
    return with_node(graph, 3, arguments=(ValueReference(graph.nodes[5].index), *graph.nodes[3].arguments[1:]))


def wrong_shape(graph: StageGraph) -> StageGraph:
    return with_node(graph, 3, outputs=(TensorSpec((3, 5, 7), torch.float32),))


def absurd_size(graph: StageGraph) -> StageGraph:
    first, *others = graph.parameters
    return replace(graph, parameters=(replace(first, shape=(2**30, 2**20)), *others))


@pytest.mark.parametrize("spoil", [forbidden_operator, circle, wrong_shape, absurd_size])
async def test_a_graph_that_is_refused_is_told_with_its_reason_and_another_one_is_taken(
    spoil: Callable[[StageGraph], StageGraph],
) -> None:
    async with swarm("ann", memory_bytes=2**33) as peers:
        (seat,) = await peers.seats()
        run = HandRun(peers.coordinator, [seat], transformer().graph, RunSettings())
        await run.load()
        run.generation = Generation(2)
        send_assignment(seat, run.assignment(spoil(run.stages[0])))
        fault = await seat.hears("fault")
        assert (fault.kind, fault.generation) == (pb.Fault.FAULT_REFUSED_GRAPH, 2)
        assert len(fault.reason) > 20
        await run.load()


async def test_bytes_that_are_no_assignment_are_refused() -> None:
    async with swarm("ann") as peers:
        (seat,) = await peers.seats()
        run = HandRun(peers.coordinator, [seat], transformer().graph, RunSettings())
        await run.load()
        run.generation = Generation(2)
        send_assignment(seat, run.assignment(run.stages[0]), b"nonsense")
        fault = await seat.hears("fault")
        assert (fault.kind, fault.generation) == (pb.Fault.FAULT_REFUSED_GRAPH, 2)
        await run.load()


async def test_a_neighbour_that_leaves_is_accused() -> None:
    model = transformer()
    samples = samples_of(model)[0]
    async with swarm("ann", "bob") as peers:
        ann, bob = await peers.seats()
        run = HandRun(peers.coordinator, (ann, bob), model.graph, RunSettings())
        await run.load(model.cuts[2:3])
        run.send_batches(1, samples)
        ann.tell(start=pb.StartStep(generation=1, step=1, num_microbatches=len(samples)))
        peers.peers["bob"].leave("the test says so")
        assert (await bob.hears("leave")).reason == "the test says so"
        fault = await ann.hears("fault")
        assert (fault.kind, fault.accused, fault.generation) == (pb.Fault.FAULT_LINK, "bob", 1)
        assert (await peers.running["bob"]).exit_code == ExitCode.FINISHED


async def test_a_neighbour_that_cannot_be_reached_is_accused_while_loading() -> None:
    model = transformer()
    async with swarm("ann", "bob") as peers:
        ann, bob = await peers.seats()
        run = HandRun(peers.coordinator, (ann, bob), model.graph, RunSettings(link_seconds=1.0))
        bob.join.address = "127.0.0.1:1"
        run.assign(model.cuts[2:3])
        fault = await ann.hears("fault")
        assert (fault.kind, fault.accused) == (pb.Fault.FAULT_LINK, "bob")
        assert "127.0.0.1:1" in fault.reason
