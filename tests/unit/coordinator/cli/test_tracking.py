"""Curves for TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.tracking import TensorBoard, Tracker, WeightsAndBiases, scalars
from atoll.coordinator.events import EvaluationEvent, VoidEvent
from atoll.protocol.errors import ResourceError
from support.events import step_event

EVALUATION = EvaluationEvent(step=2, loss=3.5, metrics={"accuracy": 0.25})


class PretendWandb(ModuleType):
    """What is used of the package ``wandb``, without its service: it keeps what it was given."""

    class Error(Exception):
        pass

    def __init__(self, refusal: str = "") -> None:
        super().__init__("wandb")
        self._refusal = refusal
        self.begun: dict[str, Any] = {}
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.is_finished = False

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **how: Any) -> SimpleNamespace:
        if self._refusal:
            raise self.Error(self._refusal)
        self.begun = how
        return SimpleNamespace(log=lambda values, step: self.logged.append((step, values)), finish=self._finish)

    def _finish(self) -> None:
        self.is_finished = True


def test_steps_and_evaluations_have_curves_and_nothing_else_has() -> None:
    step = scalars(replace(step_event(7, loss=1.5, seconds=2.0), metrics={"accuracy": 0.5}))
    assert step is not None
    assert (step[0], step[1]["training/loss"], step[1]["training/seconds"], step[1]["training/accuracy"]) == (7, 1.5, 2.0, 0.5)
    assert scalars(EVALUATION) == (2, {"validation/loss": 3.5, "validation/accuracy": 0.25})
    assert scalars(VoidEvent(step=3, reason="", peer="a", stage=0)) is None


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    tracker = Tracker(TensorBoard(tmp_path / "curves"))
    for event in (step_event(1, loss=4.0), step_event(2, loss=3.0), EVALUATION):
        tracker.event(event)
    tracker.close()
    read = EventAccumulator(str(tmp_path / "curves")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("training/loss")] == [(1, 4.0), (2, 3.0)]
    assert [(point.step, point.value) for point in read.Scalars("validation/loss")] == [(2, 3.5)]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="give another --tensorboard"):
        TensorBoard(tmp_path / "file" / "curves")


def test_weights_and_biases_is_given_the_same_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = PretendWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracker = Tracker(WeightsAndBiases("atoll", name="tiny", state=tmp_path / "state", config={"name": "tiny"}))
    tracker.event(EVALUATION)
    tracker.close()
    assert (wandb.begun["project"], wandb.begun["dir"], wandb.begun["resume"]) == ("atoll", str(tmp_path / "state"), "auto")
    assert wandb.logged == [(2, {"validation/loss": 3.5, "validation/accuracy": 0.25})]
    assert wandb.is_finished


def test_weights_and_biases_that_refuses_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", PretendWandb(refusal="no key"))
    with pytest.raises(ResourceError, match="refuses the project atoll: no key"):
        WeightsAndBiases("atoll", name="tiny", state=tmp_path, config={})


def test_a_package_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="--tensorboard needs the package tensorboard: pip install tensorboard"):
        TensorBoard(tmp_path)
    with pytest.raises(UsageError, match="--wandb needs the package wandb: pip install wandb"):
        WeightsAndBiases("atoll", name="tiny", state=tmp_path, config={})
