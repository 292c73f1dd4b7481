"""Small jobs, one for each kind of model that a run must reproduce bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.protocol.job import Job, parse_job

TOKENS = {"random": {"kind": "tokens", "vocabulary": 64, "samples": 512}, "sequence_length": 16}
IMAGES = {"random": {"kind": "images", "classes": 10, "samples": 64}, "image_size": 32}
GPT = {"layers": 4, "width": 32, "heads": 2, "context": 64, "vocabulary": 64}

HUGGING_FACE: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "llama": {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip


def make_job(model: Mapping[str, Any], data: Mapping[str, Any], base: Path, **training: Any) -> Job:
    """A job of five steps of four microbatches; ``training`` overrides."""
    settings = {
        "steps": 5,
        "batch": 8,
        "microbatch": 2,
        "optimizer": {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        "schedule": {"warmup": 2, "decay": "cosine", "final": 0.1},
        "clip_norm": 1.0,
        "seed": 7,
    }
    return parse_job({"name": "test", "model": dict(model), "data": dict(data), "training": {**settings, **training}}, base)


def gpt_job(base: Path, *, tied: bool = False, dropout: float = 0.0, data: Mapping[str, Any] = TOKENS, **training: Any) -> Job:
    """A small GPT on made-up tokens."""
    return make_job({"builtin": "gpt", "options": {**GPT, "tied": tied, "dropout": dropout}}, data, base, **training)


def resnet_job(base: Path, depth: int = 101, **training: Any) -> Job:
    """A ResNet with batch norm on small made-up images."""
    settings = {"optimizer": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9}, "batch": 4, **training}
    return make_job({"builtin": "resnet", "options": {"depth": depth, "classes": 10}}, IMAGES, base, **settings)


def huggingface_job(base: Path, name: str, **training: Any) -> Job:
    """A tiny model of the transformers library, from a configuration written to ``base``."""
    path = base / f"{name}.json"
    path.write_text(json.dumps(HUGGING_FACE[name]))
    return make_job({"huggingface": {"config": str(path)}}, TOKENS, base, **training)


def encoder_decoder_job(base: Path, **training: Any) -> Job:
    """A user's own factory: skips over stages, a parameter used three times, an operator in place."""
    factory = Path(__file__).with_name("encoder_decoder.py")
    return make_job({"factory": f"{factory}:make"}, TOKENS, base, **training)
