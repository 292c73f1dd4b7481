"""Sizes of a trace become expressions that compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atoll.coordinator.tracing.expressions import dimension_of
from atoll.coordinator.tracing.trace import trace
from atoll.protocol.errors import TraceError
from atoll.protocol.graph import Operation, evaluate
from support.graphs import source_of
from support.interpreter import interpret, state_of


class Sizes(nn.Module):
    """Computes with the sizes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, features: Tensor) -> Tensor:
        rows, columns = features.shape
        padded = torch.nn.functional.pad(features, (0, (4 - columns % 4) % 4))
        halves = features[: rows // 2, : max(columns - 2, 1)]
        square = torch.zeros(columns**2, device=features.device)
        filled = features.new_full((min(rows, columns),), rows * columns + 3)
        return (padded.sum() + halves.sum() + square.sum() + filled.sum()) * self.weight.sum()


def test_arithmetic_on_sizes() -> None:
    example = {"features": torch.zeros(6, 10)}
    graph = trace(source_of(Sizes).build(), example, {"features": (0, 1)})
    assert any(isinstance(size, Operation) for node in graph.nodes for spec in node.outputs if spec for size in spec.shape)
    module = Sizes()
    for shape in ((6, 10), (9, 11), (4, 33)):
        features = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        loss, _ = interpret(graph, state_of(graph, module), {"features": features})
        assert torch.equal(loss, module(features))


def test_fixed_sizes_stay_numbers() -> None:
    assert dimension_of(7, {}) == 7
    assert evaluate(7, {}) == 7


class Unbounded(nn.Module):
    """Has a result whose size depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, features: Tensor) -> Tensor:
        return (features.nonzero().float() * self.weight).sum()


def test_sizes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(TraceError, match="depends on the values of a tensor"):
        trace(source_of(Unbounded).build(), {"features": torch.zeros(6, 10)})
