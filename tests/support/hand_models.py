"""Small models twice over: op graphs written by hand, and plain torch functions of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from atoll.protocol.graph import OpGraph, OwnDevice, ParameterReference, ValueReference
from support.hand_graphs import BATCH, GraphBuilder

Tensors = Mapping[str, torch.Tensor]

WIDTH, HEADS, CONTEXT, VOCABULARY = 16, 2, 8, 32
CHANNELS, CLASSES, SIZE = 8, 5, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class HandModel:
    """``plain`` computes the loss from parameters, buffers (which it may change) and inputs; ``cuts`` are good places to cut.

    ``sample`` makes the inputs of one microbatch of the given number of rows.
    """

    graph: OpGraph
    plain: Callable[[Tensors, Tensors, Tensors], torch.Tensor]
    sample: Callable[[int, torch.Generator], dict[str, torch.Tensor]]
    cuts: tuple[int, ...]


def transformer(*, tied: bool = False, dropout: float = 0.0, layers: int = 2) -> HandModel:
    """A pre-norm GPT. The mask of positions is computed once and used by every layer, so it relays through all stages."""
    build = GraphBuilder()
    tokens = build.input("tokens", BATCH, CONTEXT, dtype=torch.int64)
    targets = build.input("targets", BATCH, CONTEXT, dtype=torch.int64)
    embedding = build.parameter("embedding", VOCABULARY, WIDTH)
    positions = build.parameter("positions", CONTEXT, WIDTH)
    ones = build.call("aten.ones.default", (CONTEXT, CONTEXT), keywords={"dtype": torch.bool, "device": OwnDevice()})
    mask = build.call("aten.tril.default", ones)
    x = build.call("aten.embedding.default", embedding, tokens)
    x = build.call("aten.add.Tensor", x, positions)
    first = x
    cuts = []
    for layer in range(layers):
        cuts.append(len(build.nodes))
        x = _attention(build, f"layer{layer}", x, mask, dropout)
        cuts.append(len(build.nodes))
        x = _feed_forward(build, f"layer{layer}", x)
    cuts.append(len(build.nodes))
    # A skip from the bottom to the top: a value with users on several stages.
    x = build.call("aten.add.Tensor", x, first)
    x = _norm(build, "final", x)
    head = embedding if tied else build.parameter("head", VOCABULARY, WIDTH)
    logits = build.call("aten.linear.default", x, head)
    logits = build.call("aten.view.default", logits, (-1, VOCABULARY))
    flat = build.call("aten.view.default", targets, (-1,))
    loss = build.call("aten.cross_entropy_loss.default", logits, flat)
    peak = build.call("aten.max.default", logits)

    def plain(weights: Tensors, buffers: Tensors, inputs: Tensors) -> torch.Tensor:
        causal = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
        hidden = functional.embedding(inputs["tokens"], weights["embedding"]) + weights["positions"]
        skip = hidden
        for layer in range(layers):
            name = f"layer{layer}"
            normed = _plain_norm(weights, f"{name}.norm1", hidden)
            mixed = functional.linear(normed, weights[f"{name}.qkv.weight"], weights[f"{name}.qkv.bias"])
            query, key, value = (
                part.view(-1, CONTEXT, HEADS, WIDTH // HEADS).transpose(1, 2) for part in torch.split(mixed, WIDTH, dim=2)
            )
            attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=causal)
            merged = attended.transpose(1, 2).reshape(-1, CONTEXT, WIDTH)
            hidden = hidden + functional.linear(merged, weights[f"{name}.out"])
            normed = _plain_norm(weights, f"{name}.norm2", hidden)
            wide = functional.gelu(functional.linear(normed, weights[f"{name}.up"]))
            hidden = hidden + functional.linear(wide, weights[f"{name}.down"])
        hidden = _plain_norm(weights, "final", hidden + skip)
        scores = functional.linear(hidden, weights["embedding" if tied else "head"])
        return functional.cross_entropy(scores.view(-1, VOCABULARY), inputs["targets"].view(-1))

    def sample(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        text = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
        return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}

    return HandModel(graph=build.graph(loss, peak=peak), plain=plain, sample=sample, cuts=tuple(cuts))


def _norm(build: GraphBuilder, name: str, x: ValueReference) -> ValueReference:
    weight, bias = build.parameter(f"{name}.weight", WIDTH), build.parameter(f"{name}.bias", WIDTH)
    found: ValueReference = build.call("aten.layer_norm.default", x, (WIDTH,), weight, bias, 1e-5)
    return found


def _plain_norm(weights: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def _attention(build: GraphBuilder, name: str, x: ValueReference, mask: ValueReference, dropout: float) -> ValueReference:
    qkv = build.parameter(f"{name}.qkv.weight", 3 * WIDTH, WIDTH), build.parameter(f"{name}.qkv.bias", 3 * WIDTH)
    mixed = build.call("aten.linear.default", _norm(build, f"{name}.norm1", x), *qkv)
    heads = [
        build.call(
            "aten.transpose.int",
            build.call("aten.view.default", part, (BATCH, CONTEXT, HEADS, WIDTH // HEADS)),
            1,
            2,
        )
        for part in build.call("aten.split.Tensor", mixed, WIDTH, 2)
    ]
    attended = build.call("aten.scaled_dot_product_attention.default", *heads, mask, dropout, evaluation=(*heads, mask, 0.0))
    merged = build.call("aten.reshape.default", build.call("aten.transpose.int", attended, 1, 2), (BATCH, CONTEXT, WIDTH))
    projected = build.call("aten.linear.default", merged, build.parameter(f"{name}.out", WIDTH, WIDTH))
    if dropout:
        projected = build.call("aten.dropout.default", projected, dropout, True, evaluation=(projected, dropout, False))
    found: ValueReference = build.call("aten.add.Tensor", x, projected)
    return found


def _feed_forward(build: GraphBuilder, name: str, x: ValueReference) -> ValueReference:
    normed = _norm(build, f"{name}.norm2", x)
    wide = build.call("aten.linear.default", normed, build.parameter(f"{name}.up", 4 * WIDTH, WIDTH))
    narrow = build.call(
        "aten.linear.default", build.call("aten.gelu.default", wide), build.parameter(f"{name}.down", WIDTH, 4 * WIDTH)
    )
    found: ValueReference = build.call("aten.add.Tensor", x, narrow)
    return found


def convolutional() -> HandModel:
    """Residual blocks with batch norm and activations in place, on the images and on what convolutions return."""
    build = GraphBuilder()
    images = build.input("images", BATCH, 3, SIZE, SIZE)
    labels = build.input("labels", BATCH, dtype=torch.int64)
    brighter = build.call("aten.mul_.Scalar", build.call("aten.view.default", images, (-1, 3, SIZE, SIZE)), 1.5)
    x = _convolution(build, "stem", brighter, 3)
    cuts = []
    for block in range(3):
        cuts.append(len(build.nodes))
        inner = _convolution(build, f"block{block}", x, CHANNELS)
        x = build.call("aten.relu_.default", build.call("aten.add.Tensor", inner, x))
    cuts.append(len(build.nodes))
    pooled = build.call("aten.flatten.using_ints", build.call("aten.adaptive_avg_pool2d.default", x, (1, 1)), 1)
    head = build.parameter("head.weight", CLASSES, CHANNELS), build.parameter("head.bias", CLASSES)
    scores = build.call("aten.linear.default", pooled, *head)
    loss = build.call("aten.cross_entropy_loss.default", scores, labels)

    def plain(weights: Tensors, buffers: Tensors, inputs: Tensors) -> torch.Tensor:
        hidden = _plain_convolution(weights, buffers, "stem", inputs["images"] * 1.5)
        for block in range(3):
            hidden = (_plain_convolution(weights, buffers, f"block{block}", hidden) + hidden).relu_()
        flat = functional.adaptive_avg_pool2d(hidden, (1, 1)).flatten(1)
        return functional.cross_entropy(functional.linear(flat, weights["head.weight"], weights["head.bias"]), inputs["labels"])

    def sample(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {
            "images": torch.randn(rows, 3, SIZE, SIZE, generator=generator),
            "labels": torch.randint(CLASSES, (rows,), generator=generator),
        }

    return HandModel(graph=build.graph(loss), plain=plain, sample=sample, cuts=tuple(cuts))


def _convolution(build: GraphBuilder, name: str, x: ValueReference, channels: int) -> ValueReference:
    kernel = build.parameter(f"{name}.conv", CHANNELS, channels, 3, 3)
    convolved = build.call("aten.conv2d.default", x, kernel, None, (1, 1), (1, 1))
    counter = build.buffer(f"{name}.num_batches_tracked", dtype=torch.int64, mutated=True)
    build.call("aten.add_.Tensor", counter, 1, training_only=True)
    statistics = (
        build.buffer(f"{name}.running_mean", CHANNELS, mutated=True),
        build.buffer(f"{name}.running_var", CHANNELS, mutated=True, value=1.0),
    )
    affine: tuple[ParameterReference, ...] = (
        build.parameter(f"{name}.weight", CHANNELS),
        build.parameter(f"{name}.bias", CHANNELS),
    )
    normed = build.call(
        "aten.batch_norm.default",
        *(convolved, *affine, *statistics, True, 0.1, 1e-5, True),
        evaluation=(convolved, *affine, *statistics, False, 0.1, 1e-5, True),
    )
    found: ValueReference = build.call("aten.relu_.default", normed)
    return found


def _plain_convolution(weights: Tensors, buffers: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    buffers[f"{name}.num_batches_tracked"].add_(1)
    normed = functional.batch_norm(
        functional.conv2d(x, weights[f"{name}.conv"], None, padding=1),
        buffers[f"{name}.running_mean"],
        buffers[f"{name}.running_var"],
        weights[f"{name}.weight"],
        weights[f"{name}.bias"],
        training=True,
        momentum=0.1,
        eps=1e-5,
    )
    return normed.relu_()
