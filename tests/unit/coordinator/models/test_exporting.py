"""Trained weights are loaded by Hugging Face's from_pretrained, and say the same as in the model that was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM

from atoll.coordinator.models.exporting import write_huggingface
from atoll.coordinator.tracing.source import open_source
from atoll.protocol.errors import JobError
from atoll.protocol.job import Job, load_job
from support.swarm import ROOT

OPTIONS = {"layers": 2, "width": 32, "heads": 2, "context": 256, "vocabulary": 256}


def job_of(folder: Path, name: str, **model: object) -> Job:
    """The example of that name, with another model."""
    values = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    values["model"].update(model)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_job(path)


def trained(job: Job, weights: Path) -> torch.nn.Module:
    """A model of the job with other values than a constructor gives, and its weights as a run leaves them."""
    source = open_source(job.model)
    module = source.build_real().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    save_model(source.state_module(module), str(weights))
    return module


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt-bytes", {"options": OPTIONS}),
        ("gpt-bytes", {"options": {**OPTIONS, "tied": False}}),
        ("gpt2-huggingface", {"huggingface": {"config": str(ROOT / "examples" / "gpt2-config.json"), "task": "causal-lm"}}),
    ],
    ids=["gpt", "untied", "hugging face"],
)
def test_a_language_model_says_the_same(name: str, model: dict[str, object], tmp_path: Path) -> None:
    job = job_of(tmp_path, name, **model)
    module = trained(job, tmp_path / "weights.safetensors")
    write_huggingface(job, tmp_path / "weights.safetensors", tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").train(False)
    tokens = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, module.logits(tokens), rtol=1e-5, atol=1e-5)  # type: ignore[operator]


def test_a_model_without_a_hugging_face_form_is_refused_with_what_to_do(tmp_path: Path) -> None:
    job = job_of(tmp_path, "resnet")
    trained(job, tmp_path / "weights.safetensors")
    with pytest.raises(JobError, match="--format safetensors"):
        write_huggingface(job, tmp_path / "weights.safetensors", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
