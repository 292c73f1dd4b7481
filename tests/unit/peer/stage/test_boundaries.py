"""Which messages a stage sends and expects, and what it makes of wrong ones."""

from __future__ import annotations

import pytest
import torch

from atoll.peer.stage.boundaries import Boundaries
from atoll.protocol.errors import WireError
from atoll.protocol.graph import (
    Boundary,
    ParameterSpec,
    SharedParameter,
    StageGraph,
    Symbol,
    TensorSpec,
    Use,
    ValueReference,
)
from atoll.protocol.ids import Generation, MicrobatchIndex, NodeIndex, StageIndex, StepNumber
from atoll.protocol.messages import Kind, MessageKey

HIDDEN = TensorSpec(shape=(Symbol("rows"), 4), dtype=torch.float32)
MASK = TensorSpec(shape=(Symbol("rows"),), dtype=torch.bool)


def value(node: int) -> ValueReference:
    return ValueReference(NodeIndex(node))


def boundary(node: int, source: int, target: int, spec: TensorSpec = HIDDEN) -> Boundary:
    differentiable = spec.dtype.is_floating_point
    return Boundary(
        value=value(node), spec=spec, source=StageIndex(source), target=StageIndex(target), differentiable=differentiable
    )


def use(node: int, stage: int) -> Use:
    return Use(NodeIndex(node), 1, StageIndex(stage))


def middle(*, reduced_precision: bool = False) -> Boundaries:
    """Stage 1 of 3: a hidden value and a mask from stage 0, a mask alone and a hidden value to stage 2, a tie with both."""
    graph = StageGraph(
        stage=StageIndex(1),
        num_stages=3,
        nodes=(),
        parameters=(ParameterSpec(name="emb", shape=(3, 4), dtype=torch.float32),),
        buffers=(),
        inputs=(("tokens", TensorSpec(shape=(Symbol("rows"),), dtype=torch.int64)),),
        receives=(boundary(1, 0, 1), boundary(2, 0, 1, MASK)),
        sends=(boundary(2, 1, 2, MASK), boundary(5, 1, 2)),
        shared=(SharedParameter(name="emb", uses=(use(0, 0), use(4, 1), use(9, 2))),),
    )
    return Boundaries(graph, reduced_precision=reduced_precision)


def key(kind: Kind, source: int, *, target: int = 1, evaluation: bool = False) -> MessageKey:
    return MessageKey(
        generation=Generation(1),
        step=StepNumber(1),
        microbatch=MicrobatchIndex(0),
        kind=kind,
        source=StageIndex(source),
        target=StageIndex(target),
        evaluation=evaluation,
    )


def test_neighbours_by_what_they_exchange() -> None:
    found = middle()
    assert found.activation_sources == {0}
    assert found.gradient_targets == {0}
    assert found.activation_targets == {2}
    assert found.gradient_sources == {2}
    assert found.tied_stages == {0, 2}


def test_a_side_value_that_is_no_float_has_no_gradient() -> None:
    gradients = {value(1): torch.ones(2, 4)}
    assert [name for name, _ in middle().gradient(StageIndex(0), gradients)] == ["1:0"]
    assert middle().refusal(key(Kind.GRADIENT, 2), ["5:0"]) is None


def test_messages_hold_what_crosses() -> None:
    sends = {value(2): torch.ones(2, dtype=torch.bool), value(5): torch.ones(2, 4)}
    message = middle().activation(StageIndex(2), sends)
    assert [name for name, _ in message] == ["2:0", "5:0"]
    own = {"emb@4:1": torch.ones(3, 4)}
    assert dict(middle().tied(StageIndex(2), own)).keys() == own.keys()


@pytest.mark.parametrize(
    ("wrong", "names", "why"),
    [
        (key(Kind.ACTIVATION, 2), ["5:0"], "expects no activation from stage 2"),
        (key(Kind.ACTIVATION, 0, target=2), ["1:0", "2:0"], "it is for stage 2"),
        (key(Kind.ACTIVATION, 0), ["1:0"], "holds 1:0 where 1:0, 2:0 was expected"),
        (key(Kind.GRADIENT, 2, evaluation=True), ["5:0"], "expects no gradient"),
        (key(Kind.TIED_GRADIENT, 0), ["emb@9:1"], "emb@0:1 was expected"),
        (key(Kind.STATE, 0), ["emb"], "expects no state"),
    ],
)
def test_unexpected_messages_are_refused_by_their_header(wrong: MessageKey, names: list[str], why: str) -> None:
    reason = middle().refusal(wrong, names)
    assert reason is not None
    assert why in reason


def test_expected_messages_are_not_refused() -> None:
    assert middle().refusal(key(Kind.ACTIVATION, 0), ["2:0", "1:0"]) is None
    assert middle().refusal(key(Kind.ACTIVATION, 0, evaluation=True), ["2:0", "1:0"]) is None
    assert middle().refusal(key(Kind.TIED_GRADIENT, 0), ["emb@0:1"]) is None
    assert middle().refusal(key(Kind.TIED_GRADIENT, 2), ["emb@9:1"]) is None


def test_shapes_follow_the_batch_and_wrong_ones_are_named() -> None:
    good = (("1:0", torch.ones(3, 4)), ("2:0", torch.ones(3, dtype=torch.bool)))
    assert middle().read_activation(StageIndex(0), good, {"rows": 3}).keys() == {value(1), value(2)}
    with pytest.raises(WireError, match=r"value 1:0 is torch.float32 \[3, 4\] where torch.float32 \[2, 4\] was expected"):
        middle().read_activation(StageIndex(0), good, {"rows": 2})
    with pytest.raises(WireError, match="do not bind"):
        middle().read_activation(StageIndex(0), good, {})


def test_bfloat16_stands_in_for_float32_under_autocast_alone() -> None:
    half = (("5:0", torch.ones(2, 4, dtype=torch.bfloat16)),)
    assert value(5) in middle(reduced_precision=True).read_gradient(StageIndex(2), half, {"rows": 2})
    with pytest.raises(WireError, match="bfloat16"):
        middle().read_gradient(StageIndex(2), half, {"rows": 2})


def test_a_tied_gradient_has_its_parameters_shape() -> None:
    assert middle().read_tied((("emb@0:1", torch.ones(3, 4)),)).keys() == {"emb@0:1"}
    with pytest.raises(WireError, match="not like its parameter"):
        middle().read_tied((("emb@0:1", torch.ones(4, 4)),))


def test_a_batch_holds_this_stages_inputs() -> None:
    assert middle().read_batch((("tokens", torch.zeros(2, dtype=torch.int64)),), {"rows": 2}).keys() == {"tokens"}
    with pytest.raises(WireError, match="uses"):
        middle().read_batch((), {"rows": 2})
    with pytest.raises(WireError, match=r"batch input tokens is torch\.int32"):
        middle().read_batch((("tokens", torch.zeros(2, dtype=torch.int32)),), {"rows": 2})
