"""Models of the transformers library start as their own constructor makes them, though it skips that on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.tracing.source import open_source
from atoll.coordinator.tracing.trace import trace
from atoll.peer.stage.initialisation import initial_value
from support.jobs import huggingface_job


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_weights_are_replayed_from_the_distribution_of_the_constructor(name: str, tmp_path: Path) -> None:
    job = huggingface_job(tmp_path, name)
    source, feed = open_source(job.model), open_feed(job, tmp_path)
    graph = trace(source.build(), feed.example_inputs(), feed.dynamic_dimensions)
    torch.manual_seed(0)
    real = source.state_module(source.build_real()).state_dict()
    for spec in graph.parameters:
        replayed, made = initial_value(spec, run_seed=7), real[spec.name]
        if made.std() == 0:
            assert torch.equal(replayed, made), spec.name
        else:
            deviations = 6 / made.numel() ** 0.5  # the standard error of a standard deviation is about 0.7 / sqrt(n)
            assert replayed.std().item() == pytest.approx(made.std().item(), rel=deviations), spec.name
