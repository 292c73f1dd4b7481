"""A step is a transaction on one stage; what is not finite, missing or absurd is told with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.stage.stage import MicrobatchInput, Stage, StageSettings
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.errors import ExecutionFailed, GraphRefused, NumericalFault, ResourceError, WireError
from atoll.protocol.graph import Boundary, OwnDevice, TensorSpec, ValueReference
from atoll.protocol.ids import MicrobatchIndex, StageIndex, StepNumber
from atoll.protocol.limits import Limits
from support.hand_graphs import BATCH, GraphBuilder
from support.hand_models import HandModel, convolutional, transformer
from support.pipelines import HandPipeline, Sample

SETTINGS = StageSettings(run_seed=7, device=torch.device("cpu"), optimizer=OptimizerSettings(weight_decay=0.1))


def pipeline(model: HandModel, cuts: tuple[int, ...] = (), settings: StageSettings = SETTINGS) -> HandPipeline:
    return HandPipeline(slice_graph(model.graph, cuts), settings)


def samples(model: HandModel, count: int = 2, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    return [Sample(inputs=model.sample(3, generator)) for _ in range(count)]


def everything(stages: HandPipeline) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state, copied."""
    found = stages.state()
    for stage in stages.stages:
        found.update((f"{name}/{moment}", value.clone()) for name, moment, value in stage.optimizer.state())
    return found


def assert_unchanged(before: Mapping[str, torch.Tensor], stages: HandPipeline) -> None:
    after = everything(stages)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def poisoned(sample: Sample) -> Sample:
    images = sample.inputs["images"].clone()
    images[0] = torch.nan
    return replace(sample, inputs={**sample.inputs, "images": images})


@pytest.mark.parametrize("recompute", [False, True])
def test_a_void_step_leaves_no_trace(recompute: bool) -> None:
    model = convolutional()
    tried, undisturbed = (pipeline(model, (model.cuts[1],), replace(SETTINGS, recompute=recompute)) for _ in range(2))
    first, second = samples(model, seed=1), samples(model, seed=2)
    for one in (tried, undisturbed):
        one.step(1, first)
    before = everything(tried)
    tried.gradients(2, second)
    tried.forward(2, 9, second[0])
    for stage in tried.stages:
        stage.void()
        assert stage.in_flight == 0
        assert stage.tied_gradients() == {}
    assert_unchanged(before, tried)
    assert tried.step(2, second) == undisturbed.step(2, second)
    assert_unchanged(everything(undisturbed), tried)


def test_begin_forgets_an_unfinished_step() -> None:
    model = transformer()
    stages = pipeline(model)
    expected = pipeline(model).step(1, samples(model))
    stages.gradients(1, samples(model, seed=5))
    assert stages.step(1, samples(model)) == expected


@pytest.mark.parametrize("make", [transformer, convolutional])
def test_evaluation_changes_nothing_and_keeps_nothing(make: Callable[[], HandModel]) -> None:
    model = make()
    stages = pipeline(model, (model.cuts[1],))
    stages.step(1, samples(model))
    before = everything(stages)
    losses = {stages.forward(1, 0, samples(model)[0], evaluation=True) for _ in range(2)}
    assert len(losses) == 1
    assert all(stage.in_flight == 0 for stage in stages.stages)
    assert_unchanged(before, stages)


def test_evaluation_turns_dropout_off() -> None:
    dropping, plain = pipeline(transformer(dropout=0.5)), pipeline(transformer())
    sample = samples(transformer())[0]
    assert dropping.forward(1, 0, sample, evaluation=True) == plain.forward(1, 0, sample, evaluation=True)
    assert dropping.forward(1, 0, sample) != plain.forward(1, 0, sample)


def test_the_inputs_are_never_changed() -> None:
    model = convolutional()
    sample = samples(model)[0]
    before = {name: value.clone() for name, value in sample.inputs.items()}
    pipeline(model).step(1, [sample])
    assert all(torch.equal(before[name], value) for name, value in sample.inputs.items())


def test_a_received_value_without_gradient_is_copied_before_it_changes() -> None:
    build = GraphBuilder()
    x = build.input("x", BATCH, 4)
    weight = build.parameter("weight", 4)
    noise = build.call("aten.sin.default", x)
    build.call("aten.add_.Scalar", build.call("aten.view.default", noise, (-1, 4)), 1.0)
    loss = build.call("aten.sum.default", build.call("aten.mul.Tensor", noise, weight))
    (whole,) = slice_graph(build.graph(loss), ())
    arrives = Boundary(
        value=noise,
        spec=TensorSpec((BATCH, 4), torch.float32),
        source=StageIndex(0),
        target=StageIndex(1),
        differentiable=False,
    )
    graph = replace(whole, stage=StageIndex(1), num_stages=2, nodes=whole.nodes[1:], inputs=(), receives=(arrives,))
    stage = Stage(graph, SETTINGS)
    stage.initialise({"weight": torch.ones(4)})
    received = torch.ones(2, 4)
    assert stage.forward(microbatch({noise: received})).loss == 16.0
    assert torch.equal(received, torch.ones(2, 4))


def microbatch(received: Mapping[ValueReference, torch.Tensor], **inputs: torch.Tensor) -> MicrobatchInput:
    return MicrobatchInput(index=MicrobatchIndex(0), step=StepNumber(1), inputs=inputs, received=received, bindings={"b": 2})


def test_a_loss_that_is_not_finite_names_stage_and_step() -> None:
    model = convolutional()
    stages = pipeline(model, (model.cuts[1],))
    before = everything(stages)
    with pytest.raises(NumericalFault, match=r"stage 0 saw value .* not finite, at step 3") as fault:
        stages.gradients(3, [poisoned(samples(model)[0])])
    assert (fault.value.stage, fault.value.step) == (0, 3)
    for stage in stages.stages:
        stage.void()
    assert_unchanged(before, stages)
    with pytest.raises(NumericalFault, match=r"stage 0 saw a loss of nan at step 4"):
        pipeline(model).gradients(4, [poisoned(samples(model)[0])])


def test_a_gradient_that_is_not_finite_is_seen_where_it_arrives() -> None:
    model = transformer()
    stages = pipeline(model, (model.cuts[1],))
    first = stages.stages[0]
    first.begin(StepNumber(2))
    stages.forward(2, 0, samples(model)[0])
    wrong = {
        boundary.value: torch.full(boundary.spec.sizes({"b": 3}), torch.inf)
        for boundary in first.graph.sends
        if boundary.differentiable
    }
    with pytest.raises(NumericalFault, match=r"stage 0 saw the gradient of value .* at step 2"):
        first.backward(MicrobatchIndex(0), wrong)


def test_a_gradient_of_a_parameter_that_overflows_is_seen_at_the_end() -> None:
    build = GraphBuilder()
    x = build.input("x", BATCH, 4)
    weight = build.parameter("weight", 4)
    loss = build.call("aten.sum.default", build.call("aten.mul.Tensor", x, weight))
    (graph,) = slice_graph(build.graph(loss), ())
    stage = Stage(graph, SETTINGS)
    stage.initialise({"weight": torch.zeros(4)})
    stage.begin(StepNumber(1))
    for index in range(2):
        large = microbatch({}, x=torch.full((2, 4), 1.5e38))
        stage.forward(replace(large, index=MicrobatchIndex(index)))
        stage.backward(MicrobatchIndex(index), {})
    with pytest.raises(NumericalFault, match="a gradient of weight that is not finite"):
        stage.finish()


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    model = transformer()
    stages = pipeline(model, (model.cuts[1],))
    stages.stages[0]._require_finite(torch.full((4,), 3e38), "it")


def test_what_arrives_is_checked() -> None:
    model = transformer()
    first, last = slice_graph(model.graph, (model.cuts[1],))
    stage = Stage(last, SETTINGS)
    stage.initialise()
    right = {boundary.value: torch.zeros(boundary.spec.sizes({"b": 2})) for boundary in last.receives}
    inputs = model.sample(2, torch.Generator())
    stage.begin(StepNumber(1))
    stage.forward(microbatch(right, **inputs))
    value = last.receives[0].value
    with pytest.raises(WireError, match=r"value .* of microbatch 0 is missing"):
        stage.forward(microbatch({}, **inputs))
    with pytest.raises(WireError, match="batch input 'targets' of microbatch 0 is missing"):
        stage.forward(microbatch(right, tokens=inputs["tokens"]))
    with pytest.raises(WireError, match=r"has shape \(1,\)"):
        stage.forward(microbatch({**right, value: torch.zeros(1)}, **inputs))
    with pytest.raises(WireError, match=r"has dtype torch.bfloat16"):
        stage.forward(microbatch({**right, value: right[value].bfloat16()}, **inputs))
    with pytest.raises(WireError, match=r"size 'b'"):
        stage.forward(replace(microbatch(right, **inputs), bindings={}))
    sender = Stage(first, SETTINGS)
    sender.initialise()
    sender.forward(microbatch({}, **inputs))
    with pytest.raises(WireError, match=r"the gradient of value .* is missing"):
        sender.backward(MicrobatchIndex(0), {})


def test_absurd_sizes_in_a_batch_are_refused_before_anything_is_made() -> None:
    model = transformer()
    (graph,) = slice_graph(model.graph, ())
    stage = Stage(graph, replace(SETTINGS, limits=Limits(max_tensor_bytes=2**30)))
    stage.initialise()
    with pytest.raises(ResourceError, match=r"too large for this peer; .*: node \d+: output 0 .* bytes, more than the limit"):
        stage.forward(replace(microbatch({}, **model.sample(2, torch.Generator())), bindings={"b": 10**12}))


def test_a_node_that_fails_on_its_data_is_named() -> None:
    model = transformer()
    inputs = model.sample(2, torch.Generator())
    inputs["tokens"][0, 0] = 10_000
    stage = Stage(slice_graph(model.graph, ())[0], SETTINGS)
    stage.initialise()
    with pytest.raises(ExecutionFailed, match=r"aten.embedding.default in the model \(node 2\) failed: index out of range"):
        stage.forward(microbatch({}, **inputs))


def test_memory_that_runs_out_is_told_as_such() -> None:
    build = GraphBuilder()
    x = build.input("x", BATCH, 4)
    build.parameter("weight", 4)
    huge = build.call("aten.new_zeros.default", x, (2**44,))
    loss = build.call("aten.add.Tensor", build.call("aten.sum.default", x), build.call("aten.select.int", huge, 0, 0))
    stage = Stage(slice_graph(build.graph(loss), ())[0], replace(SETTINGS, limits=Limits(max_tensor_bytes=2**60)))
    stage.initialise()
    with pytest.raises(ResourceError, match=r"memory ran out in aten\.new_zeros\.default"):
        stage.forward(microbatch({}, x=torch.ones(2, 4)))


def test_first_values_may_be_given() -> None:
    model = transformer()
    (graph,) = slice_graph(model.graph, ())
    given = {"embedding": torch.full((32, 16), 2.0)}
    stage = Stage(graph, SETTINGS)
    stage.initialise(given)
    state = dict(stage.state())
    assert torch.equal(state["embedding"], given["embedding"])
    assert not torch.equal(state["positions"], torch.full((8, 16), 2.0))
    with pytest.raises(WireError, match=r"embedding has shape \(3,\)"):
        stage.initialise({"embedding": torch.zeros(3)})
    bare = replace(graph, parameters=tuple(replace(spec, initialisation=None) for spec in graph.parameters))
    with pytest.raises(GraphRefused, match="has to be sent"):
        Stage(bare, SETTINGS).initialise()


def test_first_values_depend_on_seed_and_name_alone() -> None:
    model = transformer()
    whole = pipeline(model).state()
    assert all(torch.equal(whole[name], value) for name, value in pipeline(model, model.cuts[:3]).state().items())
    assert not torch.equal(whole["layer0.up"], whole["layer1.up"])
    other = pipeline(model, (), replace(SETTINGS, run_seed=8)).state()
    assert not torch.equal(whole["layer0.up"], other["layer0.up"])


def test_gradients_of_uses_are_exchanged_by_name_and_only_between_stages() -> None:
    model = transformer(tied=True)
    together, apart = pipeline(model), pipeline(model, (model.cuts[1],))
    for stages in (together, apart):
        stages.gradients(1, samples(model))
    assert together.stages[0].tied_gradients() == {}
    first, last = (stage.tied_gradients() for stage in apart.stages)
    assert list(first) == ["embedding@2:0"]
    assert [name.split("@")[0] for name in last] == ["embedding"]
    norms = [stage.finish({**first, **last}) for stage in apart.stages]
    assert "embedding" in norms[0]
    assert "embedding" not in norms[1]
    assert norms[0] | norms[1] == together.stages[0].finish()


def test_frozen_parameters_stay_and_report_nothing() -> None:
    build = GraphBuilder()
    x = build.input("x", BATCH, 4)
    frozen = build.parameter("frozen", 4, 4, trainable=False)
    trained = build.parameter("trained", 4, 4)
    build.parameter("unused", 4)
    hidden = build.call("aten.linear.default", build.call("aten.linear.default", x, trained), frozen)
    loss = build.call("aten.mean.default", hidden)
    (graph,) = slice_graph(build.graph(loss), ())
    graph = replace(graph, parameters=build.graph(loss).parameters)
    stage = Stage(graph, SETTINGS)
    stage.initialise()
    before = {name: value.clone() for name, value in stage.state()}
    moments = 2 * 20 * 4 + 2 * 4
    assert stage.resident_bytes == (16 + 16 + 4) * 4 + 20 * 4 + moments
    stage.begin(StepNumber(1))
    stage.forward(microbatch({}, x=torch.ones(2, 4)))
    assert stage.in_flight == 1
    stage.backward(MicrobatchIndex(0), {})
    stage.accumulate(MicrobatchIndex(0))
    norms = stage.finish()
    assert list(norms) == ["trained", "unused"]
    assert norms["unused"] == 0.0
    stage.commit(1.0, 0.1)
    after = dict(stage.state())
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["trained"]
    assert stage.resident_bytes == (16 + 16 + 4) * 4 + 20 * 4 + moments


def test_random_nodes_depend_on_their_place_alone() -> None:
    build = GraphBuilder()
    x = build.input("x", BATCH, 1000)
    build.parameter("weight", 4)
    keywords = {"device": OwnDevice()}
    draws = [build.call("aten.rand.default", (1000,), keywords=keywords) for _ in range(2)]
    first, second = (build.call("aten.sum.default", build.call("aten.mul.Tensor", x, draw)) for draw in draws)
    (graph,) = slice_graph(build.graph(first, first=first, second=second), ())
    stage = Stage(graph, SETTINGS)
    stage.initialise()

    def told(step: int, index: int) -> Mapping[str, float]:
        asked = microbatch({}, x=torch.ones(2, 1000))
        return stage.forward(replace(asked, step=StepNumber(step), index=MicrobatchIndex(index))).metrics

    stage.begin(StepNumber(1))
    here = told(1, 0)
    assert here["first"] != here["second"]
    assert here != told(1, 1)
    assert here != told(2, 0)
    torch.manual_seed(1)
    assert here == told(1, 0)
