"""The models and settings whose memory is predicted and measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.coordinator.models.gpt import GPT
from atoll.coordinator.models.huggingface import huggingface_source
from atoll.coordinator.models.resnet import ResNet
from atoll.coordinator.tracing.trace import trace
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.graph import OpGraph
from support import encoder_decoder
from support.graphs import traced
from support.memory_trials import Trial

ADAMW = OptimizerSettings(name="adamw", weight_decay=0.1)
SGD = OptimizerSettings(name="sgd")
MOMENTUM = OptimizerSettings(name="sgd", momentum=0.9)


def tokens(rows: int, length: int, vocabulary: int, generator: torch.Generator) -> Mapping[str, Tensor]:
    """A microbatch of a language model."""
    text = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def images(rows: int, size: int, generator: torch.Generator) -> Mapping[str, Tensor]:
    """A microbatch of an image classifier."""
    return {
        "images": torch.randn(rows, 3, size, size, generator=generator),
        "labels": torch.randint(10, (rows,), generator=generator),
    }


def _graph(make: Callable[[], nn.Module], sample: Callable[[torch.Generator], Mapping[str, Tensor]]) -> OpGraph:
    return traced(make, sample(torch.Generator()))


def gpt(
    name: str, *, layers: int = 12, width: int = 512, rows: int = 2, length: int = 128, vocabulary: int = 4096,
    dropout: float = 0.0, tied: bool = False, in_flight: tuple[int, ...] = (4, 3, 2), optimizer: OptimizerSettings = ADAMW,
    precision: str = "fp32", recompute: bool = False, microbatches: int = 6,
) -> Trial:  # fmt: skip
    """A GPT in as many stages as ``in_flight`` has numbers."""
    make = partial(GPT, layers=layers, width=width, heads=8, context=length, vocabulary=vocabulary, dropout=dropout, tied=tied)
    sample = partial(tokens, rows, length, vocabulary)
    return Trial(
        name=name, graph=partial(_graph, make, sample), sample=sample, in_flight=in_flight, optimizer=optimizer,
        precision=precision, recompute=recompute, microbatches=microbatches,
    )  # fmt: skip


def llama(name: str, **settings: object) -> Trial:
    """A Llama of the transformers library."""
    sample = partial(tokens, 2, 128, 4096)
    return replace(gpt(name), graph=partial(_llama_graph, sample), sample=sample, **settings)  # type: ignore[arg-type]


def _llama_graph(sample: Callable[[torch.Generator], Mapping[str, Tensor]]) -> OpGraph:
    config = {
        "model_type": "llama", "num_hidden_layers": 9, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 256, "vocab_size": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return trace(huggingface_source(path, "causal-lm").build(), sample(torch.Generator()))


def resnet(name: str, depth: int = 101, rows: int = 8, size: int = 32, **settings: object) -> Trial:
    """A ResNet on small images."""
    sample = partial(images, rows, size)
    trial = gpt(name, optimizer=MOMENTUM)
    return replace(trial, graph=partial(_graph, partial(ResNet, depth), sample), sample=sample, **settings)  # type: ignore[arg-type]


def skipping(name: str, dropout: float = 0.0, **settings: object) -> Trial:
    """An encoder-decoder with skips and an embedding used three times."""
    make = partial(encoder_decoder.make, width=512, heads=8, layers=4, vocabulary=4096, dropout=dropout)
    sample = partial(tokens, 2, 128, 4096)
    return replace(gpt(name), graph=partial(_graph, make, sample), sample=sample, **settings)  # type: ignore[arg-type]


GRID: Mapping[str, Callable[[], Trial]] = {
    "gpt": partial(gpt, "gpt"),
    "gpt-one": partial(gpt, "gpt-one", in_flight=(1, 1, 1)),
    "gpt-eight": partial(gpt, "gpt-eight", in_flight=(8, 8, 2), layers=9, microbatches=10),
    "gpt-tied": partial(gpt, "gpt-tied", tied=True),
    "gpt-vocabulary": partial(gpt, "gpt-vocabulary", vocabulary=32768, layers=6, length=64),
    "gpt-dropout": partial(gpt, "gpt-dropout", dropout=0.1),
    "gpt-sgd": partial(gpt, "gpt-sgd", optimizer=SGD),
    "gpt-momentum": partial(gpt, "gpt-momentum", optimizer=MOMENTUM),
    "gpt-recompute": partial(gpt, "gpt-recompute", recompute=True, in_flight=(8, 6, 2), microbatches=10),
    "gpt-bf16": partial(gpt, "gpt-bf16", precision="bf16"),
    "gpt-long": partial(gpt, "gpt-long", layers=6, width=256, rows=4, length=512, vocabulary=1024),
    "llama": partial(llama, "llama"),
    "llama-recompute": partial(llama, "llama-recompute", recompute=True),
    "resnet": partial(resnet, "resnet"),
    "resnet-recompute": partial(resnet, "resnet-recompute", recompute=True),
    "resnet-large": partial(resnet, "resnet-large", depth=50, rows=3, size=64),
    "skipping": partial(skipping, "skipping"),
    "skipping-dropout": partial(skipping, "skipping-dropout", dropout=0.1),
}
