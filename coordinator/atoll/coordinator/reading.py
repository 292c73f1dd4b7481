"""Events of a run, read back from its metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from atoll.coordinator.events import Event
from atoll.coordinator.run_files import METRICS, TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An event, and when it was written down: seconds since 1970, None where the file does not say."""

    event: Event
    time: float | None


def read_told(state: Path) -> Iterator[Told]:
    """The events in ``state``, in order.

    Passed over are: a last line cut short, as a killed coordinator leaves it; events that this version does not know; and those
    with a value that was not finite.
    """
    metrics = state / METRICS
    if not metrics.exists():
        return
    with metrics.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n") and (event := _event(entry := json.loads(line))) is not None:
                yield Told(event=event, time=entry.get(TIME))


def _event(entry: dict[str, Any]) -> Event | None:
    adapter = _adapters().get(entry.get("event", ""))
    try:
        return adapter.validate_python(entry) if adapter is not None else None
    except ValidationError:
        return None


@cache
def _adapters() -> dict[str, TypeAdapter[Event]]:
    return {kind.kind: TypeAdapter(kind) for kind in Event.__subclasses__()}
