"""A run's curves for TensorBoard and for Weights & Biases, where these are installed. Each tracker is a view of the run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.events import EvaluationEvent, Event, StepEvent
from atoll.protocol.errors import ResourceError
from atoll.protocol.v1.operator_pb2 import StatusReply

STEP_VALUES = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "seconds")


def scalars(event: Event) -> tuple[int, Mapping[str, float]] | None:
    """The step that an event is about and its numbers by tag; None for events without a curve. Pure."""
    if isinstance(event, StepEvent):
        values = {f"training/{name}": float(getattr(event, name)) for name in STEP_VALUES}
        return event.step, values | dict(_metrics("training", event.metrics))
    if isinstance(event, EvaluationEvent):
        return event.step, {"validation/loss": event.loss, **dict(_metrics("validation", event.metrics))}
    return None


def _metrics(part: str, metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        yield f"{part}/{name}", value


class Sink(Protocol):
    """Where curves are drawn."""

    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Gives a sink what has a curve."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def event(self, event: Event) -> None:
        """Takes note of what happened."""
        if (found := scalars(event)) is not None:
            self._sink.add(*found)

    def refresh(self, status: StatusReply) -> None:
        """Curves have what happened, and not how things stand."""

    def close(self) -> None:
        """Everything is written."""
        self._sink.close()


class TensorBoard:
    """Event files in a folder, as ``tensorboard --logdir`` reads them; those of an earlier part of the run stay beside them."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError when TensorBoard is not installed, and ResourceError when the folder cannot be written."""
        _installed("tensorboard", "--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise ResourceError(f"{folder} cannot be written: {error.strerror or error}; give another --tensorboard") from error

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in a project of Weights & Biases, under the account and in the mode that its own settings name. Its files lie in
    the run's folder; a run that is taken up again goes on there."""

    def __init__(self, project: str, *, name: str, state: Path, config: Mapping[str, Any]) -> None:
        """Raises UsageError when it is not installed, and ResourceError when it refuses."""
        wandb = _installed("wandb", "--wandb")
        state.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off")  # what the command prints stays the command's
        try:
            self._run = wandb.init(
                project=project, name=name, dir=str(state), config=dict(config), resume="auto", settings=settings
            )
        except wandb.Error as error:
            raise ResourceError(f"Weights & Biases refuses the project {project}: {error}") from error

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _installed(package: str, flag: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(f"{flag} needs the package {package}: pip install {package}") from error
