"""What is refused of a neighbour's values, and that honest training never is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peer.stage.plausibility import BOUNDS, WARMING_STEPS, Plausibility
from atoll.protocol.errors import Implausible
from atoll.protocol.graph import ValueReference
from atoll.protocol.ids import NodeIndex, PeerId
from atoll.protocol.messages import Kind

ANN = PeerId("ann")
VALUE = ValueReference(NodeIndex(7))
KINDS = (Kind.ACTIVATION, Kind.GRADIENT)


def send(watched: Plausibility, size: float, kind: Kind = Kind.ACTIVATION, dtype: torch.dtype = torch.float32) -> None:
    """A tensor whose root mean square is ``size``."""
    drawn = torch.randn(4, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    watched.check(kind, ANN, {VALUE: (drawn * (size / drawn.square().mean().sqrt())).to(dtype)}, (VALUE,))


def after_steps(kind: Kind, sizes: list[float]) -> Plausibility:
    watched = Plausibility()
    for size in sizes:
        send(watched, size, kind)
        watched.committed()
    return watched


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_refused_at_once(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 3, dtype=dtype)
    tensor[1, 1] = bad
    with pytest.raises(Implausible, match="not finite") as found:
        Plausibility().check(Kind.GRADIENT, ANN, {VALUE: tensor}, (VALUE,))
    assert found.value.peer == ANN


def test_values_that_nothing_goes_back_for_may_be_infinite() -> None:
    Plausibility().check(Kind.ACTIVATION, ANN, {VALUE: torch.full((2,), -math.inf)}, ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_far_beyond_all_before_is_refused_and_teaches_nothing(kind: Kind) -> None:
    watched = after_steps(kind, [1.0] * WARMING_STEPS)
    for _ in range(2 * WARMING_STEPS):
        with pytest.raises(Implausible, match="times as large as in the last 8 steps"):
            send(watched, 2.0 ** (BOUNDS[kind].usual + 1), kind)
        watched.dropped()
    send(watched, 2.0 ** (BOUNDS[kind].usual - 1), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_finite_is_refused_while_little_is_known(kind: Kind) -> None:
    watched = after_steps(kind, [1.0] * (WARMING_STEPS - 1))
    send(watched, 1e30, kind)


def test_gradients_of_weights_are_judged_by_their_size_alone() -> None:
    """A sum of gradients may overflow with nobody to blame: the step is void by its norm then."""
    watched = Plausibility()
    for _ in range(WARMING_STEPS):
        watched.check_weights(Kind.TIED_GRADIENT, ANN, "embedding@3:0", torch.ones(4))
        watched.committed()
    watched.check_weights(Kind.TIED_GRADIENT, ANN, "embedding@3:0", torch.full((4,), math.nan))
    watched.check_weights(Kind.TIED_GRADIENT, ANN, "another@3:0", torch.full((4,), 1e12))
    with pytest.raises(Implausible, match="the tied gradient embedding@3:0 that it sent is") as found:
        watched.check_weights(Kind.TIED_GRADIENT, ANN, "embedding@3:0", torch.full((4,), 1e12))
    assert found.value.peer == ANN


def test_numbers_whose_squares_are_too_large_are_finite() -> None:
    send(Plausibility(), 1e30)
    watched = after_steps(Kind.ACTIVATION, [1e25] * WARMING_STEPS)
    send(watched, 2e25)
    with pytest.raises(Implausible):
        send(watched, 1e30)


def test_zeros_and_a_layer_that_began_with_zeros_are_honest() -> None:
    watched = after_steps(Kind.ACTIVATION, [0.0] * 20 + [1e-7])
    send(watched, 1.0)


def test_a_gradient_may_return_to_what_it_once_was() -> None:
    """A model that has learned by heart, and one label that is wrong."""
    watched = after_steps(Kind.GRADIENT, [1.0] * 5 + [1e-9] * 100)
    send(watched, 500.0, Kind.GRADIENT)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    growth=st.lists(st.floats(-4.0, 4.0), min_size=20, max_size=80),
    spikes=st.lists(st.tuples(st.integers(0, 79), st.floats(0.0, 5.0)), max_size=8),
)
def test_training_that_wanders_and_spikes_is_never_refused(
    kind: Kind, growth: list[float], spikes: list[tuple[int, float]]
) -> None:
    """Up to 16 times more or less from one step to the next within a range of a thousand, and spikes of 32 times on top."""
    watched, level, at = Plausibility(), 0.0, dict(spikes)
    for step, change in enumerate(growth):
        level = min(5.0, max(-5.0, level + change))
        send(watched, 2.0 ** (level + at.get(step, 0.0)), kind)
        watched.committed()
