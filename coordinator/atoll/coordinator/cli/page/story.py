"""What a page that is opened in the middle of a run must be told first: the course so far, bounded. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

from atoll.coordinator.cli.view import Pace, describe
from atoll.coordinator.events import (
    EvaluationEvent,
    Event,
    FailedEvent,
    FinishedEvent,
    LinkEvent,
    PredictionEvent,
    StepEvent,
    StoppedEvent,
)

MOST_STEPS = 4000
"""Points of a curve. A longer run keeps every second, fourth ... step, and the newest."""
MOST_HAPPENINGS = 200

Fields = dict[str, Any]


class Course:
    """Takes in events, gives what they come to. ``steps`` is how many the run will have."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._points: list[Fields] = []
        self._every = 1
        self._newest: Fields | None = None
        self._evaluations: dict[int, Fields] = {}
        self._happenings: deque[Fields] = deque(maxlen=MOST_HAPPENINGS)

    def event(self, event: Event, time: float | None) -> Fields | None:
        """Takes an event in, with the time of day; what the page needs of it, None where it shows nothing of the kind."""
        match event:
            case StepEvent():
                point = {**event.as_dict(), "time": time}
                self._add(point)
                return {"kind": "step", "step": point}
            case EvaluationEvent():
                self._evaluations[event.step] = event.as_dict()
                return {"kind": "evaluation", "evaluation": event.as_dict()}
            case LinkEvent() | PredictionEvent():
                return None
            case FinishedEvent():
                return {"kind": "ended", "words": f"finished after {event.steps} steps"}
            case StoppedEvent():
                return {"kind": "ended", "words": f"stopped: {event.reason}"}
            case FailedEvent():
                return {"kind": "ended", "words": f"failed: {event.reason}"}
        words = describe(event, self._steps, Pace(self._steps))
        if not words:
            return None
        happening = {"event": event.kind, "words": words, "time": time}
        self._happenings.append(happening)
        return {"kind": "happening", "happening": happening}

    def so_far(self) -> Fields:
        """All that came before."""
        newest = [self._newest] if self._newest is not None and self._newest not in self._points[-1:] else []
        return {
            "kind": "course",
            "steps": self._steps,
            "points": [*self._points, *newest],
            "evaluations": list(self._evaluations.values()),
            "happenings": list(self._happenings),
        }

    def _add(self, point: Fields) -> None:
        self._newest = point
        if point["step"] % self._every == 0 or point["step"] == 1:
            self._points.append(point)
        if len(self._points) > MOST_STEPS:
            self._every *= 2
            self._points = [one for one in self._points if one["step"] % self._every == 0 or one["step"] == 1]
