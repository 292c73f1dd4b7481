"""What a run on fake tensors says of memory is what a real run does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from atoll.coordinator.models.gpt import GPT
from atoll.coordinator.models.resnet import ResNet
from atoll.coordinator.tracing.rehearsal import rehearse
from atoll.protocol.graph import OpGraph
from support import encoder_decoder
from support.graphs import image_batch, token_batch, traced
from support.interpreter import interpret, state_of

MODELS: Mapping[str, tuple[Callable[[], nn.Module], Mapping[str, Tensor]]] = {
    "gpt": (partial(GPT, layers=2, width=64, heads=4, context=64, vocabulary=128), token_batch(2, 32)),
    "gpt with dropout": (partial(GPT, layers=2, width=32, heads=4, context=64, vocabulary=64, dropout=0.1), token_batch(2, 16)),
    "resnet": (partial(ResNet, 18), image_batch(2, 16)),
    "encoder and decoder": (partial(encoder_decoder.make, dropout=0.1), token_batch(2, 16)),
}


@cache
def graph_of(name: str) -> OpGraph:
    return traced(*MODELS[name])


def saved_bytes(graph: OpGraph, module: nn.Module, inputs: Mapping[str, Tensor], precision: str) -> int:
    """What autograd really keeps for one microbatch, parameters, buffers and inputs aside."""
    state = state_of(graph, module)
    held = {tensor.untyped_storage().data_ptr() for tensor in (*state.values(), *inputs.values())}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        interpret(graph, state, dict(inputs))
    return sum(saved.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_saved_activations_are_counted(name: str, precision: str) -> None:
    make, inputs = MODELS[name]
    counted: dict[int, int] = {}
    for cost in rehearse(graph_of(name), precision).costs:
        counted.update(cost.saved)
    # Under bf16 a fake batch norm keeps its statistics, a number a channel, in half the precision.
    wanted = saved_bytes(graph_of(name), make(), inputs, precision)
    assert sum(counted.values()) == (pytest.approx(wanted, rel=1e-3) if precision == "bf16" else wanted)


def test_gradients_on_their_way_are_seen() -> None:
    """Through a loss over a vocabulary pass two gradients of the size of its logits."""
    graph = traced(partial(GPT, layers=1, width=16, heads=2, context=32, vocabulary=4096), token_batch(2, 32))
    costs = dict(zip((node.operator for node in graph.nodes), rehearse(graph).costs, strict=True))
    logits = 2 * 32 * 4096 * 4
    loss = costs["aten.cross_entropy_loss.default"]
    assert logits <= loss.passing_bytes < 1.1 * logits
    assert 2 * logits <= loss.gradient_bytes < 2.1 * logits


def test_matrix_flops_of_attention_are_counted() -> None:
    graph = graph_of("gpt")
    costs = zip(graph.nodes, rehearse(graph).costs, strict=True)
    found = {cost.matrix_flops for node, cost in costs if node.operator == "aten.scaled_dot_product_attention.default"}
    assert found == {2 * 2 * 2 * 32**2 * 64}
