"""Samples of text from trained weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.coordinator.cli.generate import continue_tokens, printable, sample
from atoll.coordinator.tracing.source import open_source
from atoll.protocol.job import Job, load_job
from support.swarm import write_job


def save_weights(job: Job, path: Path) -> None:
    source = open_source(job.model)
    torch.manual_seed(0)
    state = source.state_module(source.build_real()).state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, path)


def test_the_same_weights_write_the_same_text(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path))
    save_weights(job, tmp_path / "weights.safetensors")
    first = sample(job, tmp_path / "weights.safetensors", length=50)
    assert first is not None
    assert first == sample(job, tmp_path / "weights.safetensors", length=50)
    assert 0 < len(first) <= 50


def test_a_hugging_face_model_writes_too(tmp_path: Path) -> None:
    config = '{"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 256, "n_positions": 32}'
    (tmp_path / "config.json").write_text(config)
    model = {"builtin": None, "options": {}, "huggingface": {"config": "config.json"}}
    job = load_job(write_job(tmp_path, model=model))
    save_weights(job, tmp_path / "weights.safetensors")
    assert sample(job, tmp_path / "weights.safetensors", length=5)


def test_no_text_comes_from_data_that_is_none(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, data={"text": None, "random": "tokens", "validation": 0.1}))
    assert sample(job, tmp_path / "absent.safetensors") is None


def test_tokens_are_drawn_after_the_last_ones_that_fit_the_context() -> None:
    seen = []

    def successor(tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[1])
        return torch.nn.functional.one_hot((tokens + 1) % 7, 7) * 1000.0

    tokens = continue_tokens(successor, [0, 1], 6, 4, torch.Generator().manual_seed(0))
    assert tokens == [2, 3, 4, 5, 6, 0]
    assert seen == [2, 3, 4, 4, 4, 4]


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\tb\nc\x1b[31m") == "a\tb\nc\N{REPLACEMENT CHARACTER}[31m"
