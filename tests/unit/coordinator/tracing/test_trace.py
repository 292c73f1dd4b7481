"""A trace means what its model means: the same loss and gradients, bit for bit, in both modes and at other sizes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.coordinator.models.huggingface import huggingface_source
from atoll.coordinator.models.resnet import ResNet
from atoll.coordinator.tracing.export import first_line
from atoll.coordinator.tracing.source import ModelSource, factory_source
from atoll.coordinator.tracing.trace import trace
from atoll.protocol.errors import TraceError
from atoll.protocol.graph import (
    BufferReference,
    BufferSpec,
    InputReference,
    OpGraph,
    ParameterReference,
    ParameterSpec,
    Symbol,
)
from atoll.protocol.validation import validate_graph
from support.graphs import gpt_graph, image_batch, resnet_graph, small_gpt, source_of, token_batch, traced
from support.interpreter import interpret, state_of

Inputs = dict[str, Tensor]


def tokens(batch: int, length: int, vocabulary: int = 64) -> Inputs:
    """A random batch of token ids."""
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    drawn = torch.randint(vocabulary, (2, batch, length), generator=generator)
    return {"tokens": drawn[0], "targets": drawn[1]}


def images(batch: int, size: int = 16) -> Inputs:
    """A random batch of labelled images."""
    generator = torch.Generator().manual_seed(batch)
    return {
        "images": torch.randn(batch, 3, size, size, generator=generator),
        "labels": torch.randint(10, (batch,), generator=generator),
    }


def assert_same(graph: OpGraph, module: nn.Module, inputs: Inputs, inner: str = "") -> None:
    """The graph's loss, gradients and buffers are those of ``module``, in training and in evaluation mode."""
    module.train()
    twin = copy.deepcopy(module)
    loss, _ = interpret(graph, state_of(graph, twin.get_submodule(inner)), inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = module(**inputs)
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, one), (_, other) in zip(twin.named_parameters(), module.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad)), name
    for (name, held), (_, wanted) in zip(twin.named_buffers(), module.named_buffers(), strict=True):
        assert torch.equal(held, wanted), name
    with torch.no_grad():
        found, _ = interpret(graph, state_of(graph, twin.get_submodule(inner)), inputs, evaluation=True)
        module.eval()
        expected = module(**inputs)
    assert torch.equal(found, expected[0] if isinstance(expected, tuple) else expected)


def test_a_gpt_at_several_lengths() -> None:
    torch.manual_seed(1)
    graph, module = gpt_graph(tied=False), small_gpt(tied=False)
    for inputs in (tokens(2, 16), tokens(2, 64), tokens(3, 33), tokens(1, 7)):
        module.zero_grad(set_to_none=True)
        assert_same(graph, module, inputs)


def test_a_microbatch_of_one_sample_is_traced_as_such() -> None:
    torch.manual_seed(1)
    graph = traced(small_gpt, token_batch(1, 16))
    assert graph.inputs[0][1].shape == (1, Symbol("s0"))
    module = small_gpt()
    for length in (64, 128, 33):
        loss, _ = interpret(graph, state_of(graph, module), tokens(1, length))
        assert torch.equal(loss, module(**tokens(1, length)))


def test_sizes_that_vary_must_not_be_fixed_by_the_model() -> None:
    def make() -> nn.Module:
        return Failing(lambda features, linear: linear(features.reshape(2, 3, 8)).mean())

    with pytest.raises(TraceError, match="dimension 0 of its input features is 6"):
        traced(make, CORNERS)
    built = source_of(make).build()
    assert trace(built, CORNERS, {}).inputs[0][1].shape == (6, 8)


def test_a_length_of_one_among_others() -> None:
    torch.manual_seed(1)
    graph = trace(source_of(small_gpt).build(), token_batch(1, 1), {"tokens": (1,), "targets": (1,)})
    module = small_gpt()
    for length in (1, 5):
        loss, _ = interpret(graph, state_of(graph, module), tokens(1, length))
        assert torch.equal(loss, module(**tokens(1, length)))


def test_dropout_is_off_in_evaluation() -> None:
    torch.manual_seed(1)
    graph, module = gpt_graph(dropout=0.1), small_gpt(dropout=0.1).eval()
    inputs = tokens(2, 16)
    with torch.no_grad():
        loss, _ = interpret(graph, state_of(graph, module), inputs, evaluation=True)
        assert torch.equal(loss, module(**inputs))
        training, _ = interpret(graph, state_of(graph, module), inputs)
    assert not torch.equal(loss, training)


@pytest.mark.parametrize("depth", [18, 101])
def test_a_resnet_and_its_running_statistics(depth: int) -> None:
    torch.manual_seed(1)
    graph = resnet_graph(depth)
    assert_same(graph, ResNet(depth), images(4))
    counters = [spec for spec in graph.buffers if spec.name.endswith("num_batches_tracked")]
    assert counters
    assert all(spec.mutated and spec.persistent for spec in counters)
    assert {node.operator for node in graph.nodes if node.training_only} == {"aten.add_.Tensor"}


def write_config(folder: Path, **settings: object) -> Path:
    """A configuration file of a Hugging Face model."""
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return path


TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "tie_word_embeddings": False,
}
TINY_VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 10,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@pytest.mark.parametrize(
    ("settings", "task", "example", "batches"),
    [
        (TINY_LLAMA, "causal-lm", token_batch(), (tokens(2, 16), tokens(3, 33))),
        (TINY_GPT2, "causal-lm", token_batch(), (tokens(2, 16), tokens(3, 33))),
        (TINY_VIT, "image-classification", image_batch(), (images(2), images(3))),
    ],
    ids=["llama", "gpt2", "vit"],
)
def test_hugging_face_models(
    settings: dict[str, object], task: str, example: Inputs, batches: tuple[Inputs, ...], tmp_path: Path
) -> None:
    source = huggingface_source(write_config(tmp_path, **settings), task)
    torch.manual_seed(1)
    module = source.build_real()
    graph = trace(source.build(), example)
    for inputs in batches:
        module.zero_grad(set_to_none=True)
        assert_same(graph, module, inputs, inner="model")
    specs: tuple[ParameterSpec | BufferSpec, ...] = (*graph.parameters, *graph.buffers)
    names = {name for spec in specs for name in (spec.name, *spec.ties)}
    assert set(source.state_module(module).state_dict()) <= names


T5_FACTORY = """
from torch import nn
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration


class Translator(nn.Module):
    def __init__(self, layers):
        super().__init__()
        config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4, dropout_rate=0.0,
                          decoder_start_token_id=0, tie_word_embeddings=False)
        self.t5 = T5ForConditionalGeneration(config)

    def forward(self, source, tokens, targets):
        logits = self.t5(input_ids=source, decoder_input_ids=tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, {"accuracy": (logits.argmax(-1) == targets).float().mean()}


def translator(layers=2):
    return Translator(layers)
"""


def test_an_encoder_decoder_from_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "translate.py"
    path.write_text(T5_FACTORY)
    source = factory_source(path, "translator", {"layers": 1})
    torch.manual_seed(1)
    module = source.build_real()
    example = {"source": torch.zeros(2, 12, dtype=torch.long), **token_batch(2, 16)}
    graph = trace(source.build(), example)
    inputs = {"source": tokens(2, 9)["tokens"], **tokens(2, 16)}
    assert_same(graph, module, inputs)
    assert [name for name, _ in graph.metrics] == ["accuracy"]
    assert graph.inputs[0][1].shape != graph.inputs[1][1].shape


class Corners(nn.Module):
    """What models do besides layers: constants, regions without gradient or autocast, sizes in arithmetic, shared modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.head = nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor([2.0, 3.0]), persistent=False)
        self.register_buffer("kept", torch.arange(4))

    def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.second(torch.relu(self.first(features)))
        hidden = hidden * torch.tensor([1.0, 2.0] * 4, device=features.device) + torch.tensor(0.5)
        with torch.no_grad():
            mean = hidden.mean() * self.get_buffer("scale").sum()
        with torch.autocast(features.device.type, enabled=False):
            hidden = hidden.float() / (features.shape[0] * 2)
        left, right = hidden.chunk(2, dim=1)
        logits = self.head(torch.cat([right, left], dim=1)) * mean
        return functional.cross_entropy(logits, labels), {"mean": mean}


CORNERS = {"features": torch.zeros(6, 8), "labels": torch.zeros(6, dtype=torch.long)}


def test_the_corners_of_models() -> None:
    torch.manual_seed(1)
    graph = traced(Corners, CORNERS)
    inputs = {"features": torch.randn(5, 8), "labels": torch.tensor([0, 1, 2, 3, 0])}
    module = Corners()
    state = state_of(graph, module)
    built = source_of(Corners).build()
    trace(built, CORNERS)
    state.update((BufferReference(name), value) for name, value in built.constants.items())
    loss, metrics = interpret(graph, state, inputs)
    expected, wanted = module(**inputs)
    assert torch.equal(loss, expected)
    assert torch.equal(metrics["mean"], wanted["mean"])
    assert not all(node.gradient for node in graph.nodes)
    assert any(node.full_precision for node in graph.nodes)


def test_names_ties_and_state_that_nothing_uses() -> None:
    graph = traced(Corners, CORNERS)
    parameters = {spec.name: spec for spec in graph.parameters}
    assert list(parameters) == ["unused", "first.weight", "first.bias", "head.weight", "head.bias"]
    assert parameters["first.weight"].ties == ("second.weight",)
    buffers = {spec.name: spec.persistent for spec in graph.buffers}
    assert buffers.pop("kept") is True
    assert buffers.pop("scale") is False
    assert not any(buffers.values())
    assert all(spec.initialisation is not None for spec in graph.buffers)


def test_tied_weights_have_one_name() -> None:
    graph = gpt_graph(tied=True)
    embedding = next(spec for spec in graph.parameters if spec.name == "token_embedding.weight")
    assert embedding.ties == ("head.weight",)
    uses = [reference for node in graph.nodes for reference in node.references()]
    assert uses.count(ParameterReference("token_embedding.weight")) == 2


def test_traces_are_reproducible_and_valid() -> None:
    assert traced(lambda: small_gpt(dropout=0.1), token_batch()) == gpt_graph(dropout=0.1)
    validate_graph(resnet_graph())


def test_no_device_is_baked_in() -> None:
    for graph in (gpt_graph(), traced(Corners, CORNERS)):
        assert "meta" not in repr(graph)


class Depth(nn.Module):
    """Drops its branch at random, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        branch = self.branch(features)
        if self.training:
            keep = torch.rand(features.shape[0], 1, device=features.device) < 0.5
            branch = branch / 0.5 * keep
        return functional.cross_entropy(self.head(features + branch), labels)


def test_a_branch_that_training_alone_takes() -> None:
    torch.manual_seed(1)
    graph, module = traced(Depth, CORNERS), Depth().eval()
    inputs = {"features": torch.randn(5, 8), "labels": torch.tensor([0, 1, 2, 3, 0])}
    with torch.no_grad():
        loss, _ = interpret(graph, state_of(graph, module), inputs, evaluation=True)
        assert torch.equal(loss, module(**inputs))


class Failing(nn.Module):
    """Does in its forward what ``what`` says."""

    def __init__(self, what: Callable[[Tensor, nn.Linear], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.what = what

    def forward(self, features: Tensor, labels: Tensor) -> object:
        return self.what(features, self.linear)


def _changes_its_input(features: Tensor, linear: nn.Linear) -> Tensor:
    features.mul_(2.0)
    return linear(features).mean()  # type: ignore[no-any-return]


def _changes_its_weights(features: Tensor, linear: nn.Linear) -> Tensor:
    with torch.no_grad():
        linear.weight.mul_(0.5)
    return linear(features).mean()  # type: ignore[no-any-return]


def _looks_at_values(features: Tensor, linear: nn.Linear) -> Tensor:
    hidden: Tensor = linear(features)
    return hidden.mean() if hidden.sum() > 0 else hidden.sum()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda features, linear: linear(features), "must be one floating-point number"),
        (lambda features, linear: {"loss": linear(features).mean()}, "must return the loss"),
        (lambda features, linear: linear(features)[features.sum(1) > 0].mean(), "values of a tensor"),
        (lambda features, linear: linear(features).mean() * (1.0 / features.shape[0]), "a fraction or a condition from a size"),
        (lambda features, linear: linear(features).sort().values.to_sparse().sum(), "sparse"),
        (_looks_at_values, "looks at the values of a tensor"),
        (_changes_its_input, "modifies its input features"),
        (_changes_its_weights, "modifies its parameter linear.weight"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_what_to_change(what: Callable[[Tensor, nn.Linear], object], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        traced(lambda: Failing(what), CORNERS)


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(TraceError, match="tokens, targets"):
        traced(lambda: ResNet(18), token_batch())


def test_a_broken_factory_is_told(tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text("from torch import nn\ndef number():\n    return 3\ndef wide(width):\n    return nn.Linear(width, 1)\n")
    cases: Mapping[str, str] = {"number": "must return a torch.nn.Module", "absent": "no function absent", "wide": "width"}
    for function, said in cases.items():
        with pytest.raises(TraceError, match=said):
            factory_source(path, function).build()


def test_inputs_that_the_model_does_not_use_stay_inputs() -> None:
    graph = traced(lambda: Failing(lambda features, linear: linear(features).mean()), CORNERS)
    assert [name for name, _ in graph.inputs] == ["features", "labels"]
    assert InputReference("labels") not in {reference for node in graph.nodes for reference in node.references()}


def test_build_real_gives_real_weights() -> None:
    module = ModelSource(description="a GPT", make=small_gpt).build_real()
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


def test_of_an_error_its_first_line_is_told() -> None:
    told = [first_line(error) for error in (ValueError("\nwrong\nhere"), NotImplementedError(), RuntimeError(" \n"))]
    assert told == ["wrong", "no message", "no message"]
