"""First values and random numbers depend on seed and name or place alone, whoever draws them and whatever else is drawn."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from atoll.peer.stage.initialisation import initial_value
from atoll.peer.stage.optimizer import Optimizer
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.errors import GraphRefused
from atoll.protocol.graph import Initialisation, InputReference, ParameterSpec, ValueReference
from atoll.protocol.ids import MicrobatchIndex, NodeIndex, StepNumber
from atoll.protocol.randomness import name_seed, node_seed, seeded
from support.hand_graphs import filled, normal

CPU = torch.device("cpu")


def parameter(name: str = "weight", program: Initialisation | None = None) -> ParameterSpec:
    return ParameterSpec(name=name, shape=(3, 5), dtype=torch.float32, initialisation=program or normal((3, 5), 0.1))


def test_seeds_are_what_the_protocol_says() -> None:
    digest = hashlib.blake2b(b"7/2/1/40").digest()
    expected = int.from_bytes(digest[:8], "big") & (2**63 - 1)
    assert node_seed(7, StepNumber(2), MicrobatchIndex(1), NodeIndex(40)) == expected
    assert name_seed(7, "weight") != name_seed(8, "weight")


def test_a_first_value_is_drawn_from_seed_and_name() -> None:
    value = initial_value(parameter(), 7)
    torch.manual_seed(123)
    assert torch.equal(initial_value(parameter(), 7), value)
    assert not torch.equal(initial_value(parameter("other"), 7), value)
    assert not torch.equal(initial_value(parameter(), 8), value)
    torch.manual_seed(name_seed(7, "weight"))
    assert torch.equal(torch.empty(3, 5).normal_(0.0, 0.1), value)


def test_a_copy_draws_the_numbers_of_what_it_copies() -> None:
    copying = parameter("copy", replace(normal((3, 5), 0.1), seed="weight"))
    assert torch.equal(initial_value(copying, 7), initial_value(parameter(), 7))


def test_a_first_value_is_converted_to_the_parameters_dtype() -> None:
    short = replace(parameter(), dtype=torch.bfloat16)
    assert torch.equal(initial_value(short, 7), initial_value(parameter(), 7).bfloat16())


def test_programs_that_fail_are_refused_with_the_parameters_name() -> None:
    with pytest.raises(GraphRefused, match=r"of weight makes shape \(2, 2\) instead of \(3, 5\)"):
        initial_value(parameter(program=filled((2, 2), 1.0, torch.float32)), 7)
    good = normal((3, 5), 0.1)
    foreign = replace(good.nodes[1], arguments=(InputReference("x"),))
    with pytest.raises(GraphRefused, match="of weight refers to"):
        initial_value(parameter(program=replace(good, nodes=(good.nodes[0], foreign))), 7)
    wrong = replace(good.nodes[1], arguments=(ValueReference(NodeIndex(0)), 0.0, -1.0))
    with pytest.raises(GraphRefused, match=r"node 1: the initialisation of weight fails in aten\.normal_\.default"):
        initial_value(parameter(program=replace(good, nodes=(good.nodes[0], wrong))), 7)
    with pytest.raises(GraphRefused, match="has to be sent"):
        initial_value(replace(parameter(), initialisation=None), 7)


def test_threads_do_not_disturb_one_another() -> None:
    def draw(seed: int) -> torch.Tensor:
        with seeded(CPU, seed):
            return torch.cat([torch.rand(50) for _ in range(20)])

    alone = [draw(seed) for seed in range(16)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(draw, range(16)))
    assert all(torch.equal(first, second) for first, second in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "settings",
    [OptimizerSettings(weight_decay=0.1), OptimizerSettings(name="sgd", momentum=0.9), OptimizerSettings(name="sgd")],
    ids=["adamw", "momentum", "sgd"],
)
def test_moments_move_by_name(settings: OptimizerSettings) -> None:
    def trained(optimizer: Optimizer, weight: torch.Tensor, steps: range) -> torch.Tensor:
        for step in steps:
            weight.grad = torch.full_like(weight, float(step))
            optimizer.update({"weight": weight, "idle": torch.ones(2)}, 0.1 / step)
        return weight

    whole = trained(Optimizer(settings), torch.ones(4), range(1, 7))
    first, second = Optimizer(settings), Optimizer(settings)
    weight = trained(first, torch.ones(4), range(1, 4))
    for name, moment, value in first.state():
        assert name == "weight"
        second.load(name, moment, value.clone())
    assert torch.equal(trained(second, weight, range(4, 7)), whole)
    assert second.num_bytes == first.num_bytes
