"""Whether two runs came to the same."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from atoll.coordinator.events import EvaluationEvent, FinishedEvent, StepEvent
from support.coordinated import Coordinated


def assert_same(run: Coordinated, other: Coordinated) -> None:
    """The same losses, norms, samples, evaluations and weights, bit for bit."""
    assert _steps(run) == _steps(other)
    assert _evaluations(run) == _evaluations(other)
    weights, expected = (load_file(one.told(FinishedEvent)[0].weights) for one in (run, other))
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


def _steps(run: Coordinated) -> list[tuple[int, float, float, str]]:
    return [(event.step, event.loss, event.grad_norm, event.samples) for event in run.told(StepEvent)]


def _evaluations(run: Coordinated) -> list[tuple[int, float]]:
    return [(event.step, event.loss) for event in run.told(EvaluationEvent)]
