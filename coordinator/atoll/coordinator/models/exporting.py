"""Trained weights as a folder that Hugging Face's ``from_pretrained`` loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.coordinator.models.huggingface import quiet_transformers
from atoll.coordinator.tracing.source import open_source
from atoll.protocol.errors import JobError
from atoll.protocol.job import Job
from atoll.protocol.job_model import ModelSection

BYTES = "bytes"


def write_huggingface(job: Job, weights: Path, folder: Path) -> None:
    """Writes the configuration, the weights, and the tokenizer if the job has one, into ``folder``.

    ``weights`` is a run's safetensors file. Raises JobError for a model that has no Hugging Face form, TraceError where the
    package transformers is missing.
    """
    model, state = _as_huggingface(job.model, load_file(weights))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=state)
    if job.data.text is not None and job.data.tokenizer != BYTES:
        shutil.copyfile(job.data.tokenizer, folder / "tokenizer.json")


def _as_huggingface(section: ModelSection, state: Mapping[str, Tensor]) -> tuple[Any, Mapping[str, Tensor]]:
    """A model of transformers without storage, and the weights under its names."""
    if section.huggingface is not None:
        source = open_source(section)
        return source.state_module(source.build_real("meta")), state
    if section.builtin == "gpt" and not isinstance(section.options, dict):
        return _gpt2(section.options.model_dump()), dict(_gpt2_state(state))
    name = f"the built-in model {section.builtin}" if section.builtin is not None else "a model from a factory"
    raise JobError(
        "model", f"{name} has no Hugging Face form: `atoll export --format safetensors` gives weights for its own class"
    )


def _gpt2(options: Mapping[str, Any]) -> Any:
    """The built-in GPT is a GPT-2 whose GELU is exact."""
    transformers = quiet_transformers()
    config = transformers.GPT2Config(
        vocab_size=options["vocabulary"],
        n_positions=options["context"],
        n_embd=options["width"],
        n_layer=options["layers"],
        n_head=options["heads"],
        activation_function="gelu",
        layer_norm_epsilon=torch.nn.LayerNorm(1).eps,
        embd_pdrop=options["dropout"],
        resid_pdrop=options["dropout"],
        attn_pdrop=options["dropout"],
        tie_word_embeddings=options["tied"],
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config)


_GPT2_NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT2_PARTS = {
    "attention_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.output": "mlp.c_proj",
}
_TRANSPOSED = ("c_attn", "c_proj", "c_fc")
"""Linear maps that GPT-2 keeps as [inputs, outputs]."""


def _gpt2_state(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        module, _, kind = name.rpartition(".")
        if module.startswith("blocks."):
            _, number, part = module.split(".", 2)
            renamed = f"transformer.h.{number}.{_GPT2_PARTS[part]}"
        else:
            renamed = _GPT2_NAMES[module]
        transposed = kind == "weight" and renamed.endswith(_TRANSPOSED)
        yield f"{renamed}.{kind}", value.t().contiguous() if transposed else value
