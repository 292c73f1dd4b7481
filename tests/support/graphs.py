"""Small models and their op graphs, for tests of what works on graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn

from atoll.coordinator.models.gpt import GPT
from atoll.coordinator.models.resnet import ResNet
from atoll.coordinator.tracing.source import ModelSource
from atoll.coordinator.tracing.trace import trace
from atoll.protocol.graph import OpGraph


def source_of(make: Callable[[], nn.Module], inner: str = "") -> ModelSource:
    """A source that calls ``make``."""
    return ModelSource(description="the test's model", make=make, inner=inner)


def traced(make: Callable[[], nn.Module], example: Mapping[str, Tensor]) -> OpGraph:
    """The op graph of what ``make`` returns."""
    return trace(source_of(make).build(), example)


def token_batch(batch: int = 2, length: int = 16) -> dict[str, Tensor]:
    """Inputs of a language model; zeros, since tracing looks at shapes alone."""
    return {name: torch.zeros(batch, length, dtype=torch.long) for name in ("tokens", "targets")}


def image_batch(batch: int = 2, size: int = 16) -> dict[str, Tensor]:
    """Inputs of an image classifier."""
    return {"images": torch.zeros(batch, 3, size, size), "labels": torch.zeros(batch, dtype=torch.long)}


def small_gpt(layers: int = 2, dropout: float = 0.0, tied: bool = True) -> GPT:
    """A GPT of width 32."""
    return GPT(layers=layers, width=32, heads=4, context=128, vocabulary=64, dropout=dropout, tied=tied)


@cache
def gpt_graph(layers: int = 2, dropout: float = 0.0, tied: bool = True) -> OpGraph:
    """The op graph of :func:`small_gpt`."""
    return traced(lambda: small_gpt(layers, dropout, tied), token_batch())


@cache
def resnet_graph(depth: int = 18) -> OpGraph:
    """The op graph of a small-image ResNet."""
    return traced(lambda: ResNet(depth), image_batch())
