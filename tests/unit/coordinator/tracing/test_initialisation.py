"""What a constructor does to its tensors is replayed: the same distribution, a function of the seed and the name alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from atoll.coordinator.models.resnet import ResNet
from atoll.coordinator.tracing.initialisation import Programs, constant_program
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.coordinator.tracing.source import BuiltModel
from atoll.coordinator.tracing.state_names import NamedTensor, StateNames
from atoll.coordinator.tracing.trace import trace
from atoll.peer.stage.initialisation import initial_value
from atoll.protocol.errors import TraceError
from atoll.protocol.graph import BufferSpec, Initialisation, ParameterSpec
from support.graphs import small_gpt, source_of, token_batch


class Initialised(nn.Module):
    """One tensor for each way of making one."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Parameter(torch.empty(48, 64))
        nn.init.orthogonal_(self.orthogonal, gain=2.0)
        self.tall = nn.Parameter(torch.empty(64, 48))
        nn.init.orthogonal_(self.tall)
        self.truncated = nn.Parameter(torch.empty(80, 80))
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.03, b=0.03)
        self.sparse = nn.Parameter(torch.empty(60, 20))
        nn.init.sparse_(self.sparse, 0.5)
        self.dirac = nn.Parameter(torch.empty(4, 4, 3))
        nn.init.dirac_(self.dirac)
        self.kaiming = nn.Conv2d(8, 16, 3)
        self.embedding = nn.Embedding(50, 64, padding_idx=3)
        self.statistics = nn.BatchNorm2d(8)
        self.recurrent = nn.LSTM(8, 16)
        self.drawn = nn.Parameter(torch.randn(60, 60) * 0.02 + 1.0)
        self.added = nn.Parameter(torch.zeros(3))
        self.added.data = self.added.data + 1
        self.old_style = nn.Parameter(torch.Tensor(20, 30))
        nn.init.xavier_uniform_(self.old_style)
        self.rows = nn.Parameter(torch.zeros(40, 40))
        with torch.no_grad():
            self.rows[1:30].normal_()
            self.rows[:, 0] = 5
        self.scaled = nn.Linear(40, 40)
        self.scaled.weight.data.copy_(self.scaled.weight.data.t().contiguous() * 3.0)
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(30, 30))
        self.lower = nn.Linear(40, 40).to(torch.bfloat16)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))
        self.register_buffer("frequencies", 1.0 / (10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)))
        self.register_buffer("flags", torch.tensor([[True, False], [False, True]]))


@cache
def built() -> BuiltModel:
    """The model on the meta device."""
    return source_of(Initialised).build()


@cache
def programs() -> Programs:
    """Its programs."""
    return built().recording.programs(StateNames(built().module))


@cache
def reference() -> dict[str, Tensor]:
    """What the constructor makes."""
    torch.manual_seed(5)
    module = Initialised()
    return dict(module.named_parameters()) | dict(module.named_buffers())


def named() -> tuple[NamedTensor, ...]:
    """Every tensor of the model."""
    names = StateNames(built().module)
    return (*names.parameters, *names.buffers)


def spec(one: NamedTensor, program: Initialisation | None) -> ParameterSpec:
    """What a peer is told about a tensor."""
    return ParameterSpec(name=one.name, shape=tuple(one.tensor.shape), dtype=one.tensor.dtype, initialisation=program)


@pytest.mark.parametrize("one", named(), ids=lambda one: one.name)
def test_a_replay_makes_what_the_constructor_makes(one: NamedTensor) -> None:
    program = programs()[one.name]
    assert program is not None
    value = initial_value(spec(one, program), run_seed=7)
    expected = reference()[one.name].detach()
    assert value.shape == expected.shape
    assert value.dtype == expected.dtype
    if not any("normal" in node.operator or "uniform" in node.operator or "rand" in node.operator for node in program.nodes):
        assert torch.equal(value, expected)
        return
    value, expected = value.double(), expected.double()
    spread = float(expected.std())
    assert float(value.std()) == pytest.approx(spread, rel=0.25)
    assert float(value.mean()) == pytest.approx(float(expected.mean()), abs=5 * spread / value.numel() ** 0.5)


def test_details_of_the_replays() -> None:
    value = {one.name: initial_value(spec(one, programs()[one.name]), run_seed=1) for one in named()}
    identity = value["orthogonal"] @ value["orthogonal"].t()
    assert torch.allclose(identity, 4.0 * torch.eye(48), atol=1e-4)
    assert torch.allclose(value["tall"].t() @ value["tall"], torch.eye(48), atol=1e-4)
    assert float(value["truncated"].abs().max()) <= 0.03
    assert torch.equal(value["embedding.weight"][3], torch.zeros(64))
    assert torch.equal((value["sparse"] == 0).sum(0), torch.full((20,), 30))
    assert torch.equal(value["rows"][:, 0], torch.full((40,), 5.0))
    assert torch.equal(value["rows"][30:, 1:], torch.zeros(10, 39))


def test_values_depend_on_seed_and_name_alone() -> None:
    by_name = {one.name: spec(one, programs()[one.name]) for one in named()}
    first = initial_value(by_name["drawn"], 1)
    initial_value(by_name["truncated"], 1)
    assert torch.equal(first, initial_value(by_name["drawn"], 1))
    assert not torch.equal(first, initial_value(by_name["drawn"], 2))
    assert not torch.equal(
        initial_value(by_name["recurrent.weight_hh_l0"], 1)[:, :8], initial_value(by_name["recurrent.weight_ih_l0"], 1)
    )


def test_the_coordinator_makes_the_same_values_as_peers() -> None:
    for one in named():
        assert torch.equal(built().computed_value(one.name, 7), initial_value(spec(one, programs()[one.name]), 7)), one.name


def test_every_layout_starts_from_the_same_weights() -> None:
    graph = trace(source_of(small_gpt).build(), token_batch())
    whole = {each.name: initial_value(each, 3) for each in graph.parameters}
    for cuts in ((14,), (5, 20, 33)):
        for stage in slice_graph(graph, cuts):
            for each in stage.parameters:
                assert torch.equal(initial_value(each, 3), whole[each.name])


class Teacher(nn.Module):
    """A student and its copy."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 8)
        self.teacher = copy.deepcopy(self.student)
        self.other = nn.Linear(8, 8)


def test_a_copy_starts_equal_to_its_original() -> None:
    model = source_of(Teacher).build()
    names = StateNames(model.module)
    found = model.recording.programs(names)
    value = {one.name: initial_value(spec(one, found[one.name]), 7) for one in names.parameters}
    assert torch.equal(value["student.weight"], value["teacher.weight"])
    assert torch.equal(value["student.bias"], value["teacher.bias"])
    assert not torch.equal(value["student.weight"], value["other.weight"])
    assert torch.equal(model.computed_value("teacher.weight", 7), value["student.weight"])


class Unusual(nn.Module):
    """Tensors that no short program makes, and a constructor that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [float(rate) for rate in torch.linspace(0, 0.4, 5)]
        self.sizes = torch.arange(3).tolist()
        self.big = nn.Parameter(torch.tensor([float(value * value) for value in range(1000)]))
        self.given = nn.Parameter(torch.linspace(0, 1, 200, device="cpu") ** 2)
        self.never_set = nn.Parameter(torch.empty(7))
        self.linear = nn.Linear(len(self.sizes), 1)
        self.other = self.linear


def test_what_cannot_be_replayed_is_made_by_the_coordinator() -> None:
    model = source_of(Unusual).build()
    assert isinstance(model.module, Unusual)
    assert model.module.rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert model.module.sizes == [0, 1, 2]
    assert all(parameter.device.type == "meta" for parameter in model.module.parameters())
    names = StateNames(model.module)
    found = model.recording.programs(names)
    assert found["big"] is None
    computed = {name: model.computed_value(name, 7) for name in ("big", "given", "never_set")}
    assert torch.equal(computed["big"], torch.arange(1000.0) ** 2)
    assert torch.allclose(computed["given"], torch.linspace(0, 1, 200) ** 2)
    assert torch.equal(computed["never_set"], torch.zeros(7))


class Undecided(nn.Module):
    """Chooses its size by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(int(torch.randint(2, 5, ())), 1)


def test_a_constructor_must_not_decide_by_chance() -> None:
    with pytest.raises(TraceError, match="random numbers"):
        source_of(Undecided).build()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor([1, 2, 3]),
        torch.tensor([[True], [False]]),
        torch.zeros(0, 3),
        torch.full((100, 100), -2.0, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_small_constants_are_written_out(tensor: Tensor) -> None:
    program = constant_program(tensor)
    buffer = BufferSpec(name="constant", shape=tuple(tensor.shape), dtype=tensor.dtype, initialisation=program)
    assert torch.equal(initial_value(buffer, 0), tensor)


def test_large_constants_are_not() -> None:
    assert constant_program(torch.arange(1000.0)) is None


@pytest.mark.parametrize("make", [small_gpt, lambda: ResNet(50)], ids=["gpt", "resnet"])
def test_the_built_in_models_need_no_values_sent(make: Callable[[], nn.Module]) -> None:
    model = source_of(make).build()
    assert all(program is not None for program in model.recording.programs(StateNames(model.module)).values())
