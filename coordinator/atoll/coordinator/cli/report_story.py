"""What a run's events amount to: its last plan, what was predicted and what came, its links, its mishaps, where its time went,
and what would make it faster. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.coordinator.cli import formatting
from atoll.coordinator.cli.report import History, history_of
from atoll.coordinator.cli.view import Pace, describe
from atoll.coordinator.events import (
    Event,
    FailedEvent,
    FinishedEvent,
    LinkEvent,
    MovedEvent,
    PausedEvent,
    PeerEvent,
    PlanEvent,
    PredictionEvent,
    RecoveredEvent,
    ReplayedEvent,
    RestoredEvent,
    ResumedEvent,
    SnapshotEvent,
    StepEvent,
    StoppedEvent,
    VoidEvent,
)
from atoll.coordinator.reading import Told

COMING_AND_GOING = ("joined", "left", "lost")
OFF = 0.2
"""A prediction that is off by more than this share is worth a word."""
MUCH = 0.05
"""What takes more than this share of a run's time is worth a word."""
BUSY = 0.5
"""A link that is busy for more than this share of a step may hold it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """``step`` is the last step that was committed before it; ``seconds`` since the run's first event, None where unknown."""

    step: int
    seconds: float | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What took ``seconds`` of the run's time."""

    what: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """``predictions`` and ``links`` are the latest of each kind, ``throughput`` pairs of step and tokens/s."""

    history: History
    outcome: str
    throughput: tuple[tuple[int, float], ...]
    plan: PlanEvent | None
    num_plans: int
    predictions: tuple[PredictionEvent, ...]
    links: tuple[LinkEvent, ...]
    happenings: tuple[Happening, ...]
    shares: tuple[Share, ...]
    advice: tuple[str, ...]


def tell(told: Sequence[Told]) -> Story:
    """The story of a run. ``told`` are its events in order."""
    events = [one.event for one in told]
    plans = [event for event in events if isinstance(event, PlanEvent)]
    predictions = {(one.what, one.peer, one.target): one for one in events if isinstance(one, PredictionEvent)}
    links = {(one.source, one.target, one.direction): one for one in events if isinstance(one, LinkEvent)}
    plan = plans[-1] if plans else None
    return Story(
        history=history_of(told),
        outcome=_outcome(events),
        throughput=tuple({one.step: one.tokens_per_second for one in events if isinstance(one, StepEvent)}.items()),
        plan=plan,
        num_plans=len(plans),
        predictions=tuple(predictions.values()),
        links=tuple(links.values()),
        happenings=tuple(_happenings(told)),
        shares=tuple(_shares(told)),
        advice=tuple(_advice(plan, tuple(predictions.values()), tuple(links.values()), events)),
    )


def _outcome(events: Sequence[Event]) -> str:
    """How the run ended, or that it did not; one that was taken up again after it failed counts by what came last."""
    last = next(
        (one for one in reversed(events) if isinstance(one, FinishedEvent | StoppedEvent | FailedEvent | StepEvent)), None
    )
    match last:
        case FinishedEvent():
            return f"finished after {last.steps} steps"
        case StoppedEvent():
            return f"stopped: {last.reason}"
        case FailedEvent():
            return f"failed: {last.reason}"
        case StepEvent():
            return f"not finished; its last committed step is {last.step}"
        case _:
            return "no step was committed"


def _happenings(told: Sequence[Told]) -> Iterator[Happening]:
    step = 0
    start = next((one.time for one in told if one.time is not None), None)
    for one in told:
        if isinstance(one.event, StepEvent):
            step = one.event.step
        seconds = one.time - start if one.time is not None and start is not None else None
        if (words := _words(one.event)) is not None:
            yield Happening(step=step, seconds=seconds, words=words)


def _words(event: Event) -> str | None:
    match event:
        case StoppedEvent():
            return f"stopped: {event.reason}"
        case FailedEvent():
            return f"failed: {event.reason}"
        case PlanEvent():
            return f"plan {event.generation} is made"
        case PeerEvent() if event.state in COMING_AND_GOING:
            return describe(event, 0, Pace(0))
        case SnapshotEvent() if event.failure:
            return describe(event, 0, Pace(0))
        case VoidEvent() | MovedEvent() | RestoredEvent() | RecoveredEvent() | PausedEvent() | ResumedEvent():
            return describe(event, 0, Pace(0))
        case _:
            return None


def _shares(told: Sequence[Told]) -> Iterator[Share]:
    """Where the time went. What passed before the first step, and between steps, is known where events carry their time."""
    events = [one.event for one in told]
    steps, recovering = _seconds(events, StepEvent), _seconds(events, RecoveredEvent)
    moving, replayed = _seconds(events, MovedEvent), _seconds(events, ReplayedEvent)
    snapshots = sum(one.stalled_seconds for one in events if isinstance(one, SnapshotEvent))
    yield Share(what="steps that were committed", seconds=steps)
    if recovering:
        yield Share(what="from a loss to the next new step", seconds=recovering)
    if replayed:
        yield Share(what="steps done again (part of the former, where a loss led to them)", seconds=replayed)
    if moving:
        yield Share(what="state changing hands for another plan", seconds=moving)
    if snapshots:
        yield Share(what="computing that waited for snapshots (part of the steps)", seconds=snapshots)
    starts = [one.time for one in told if one.time is not None and isinstance(one.event, StepEvent)]
    firsts = [one.time for one in told if one.time is not None]
    if starts and firsts:
        yield Share(what="joining, measuring and loading, until the first step was committed", seconds=starts[0] - firsts[0])


def _seconds(events: Sequence[Event], kind: type[StepEvent | RecoveredEvent | MovedEvent | ReplayedEvent]) -> float:
    """What the events of a kind took in all."""
    return sum(one.seconds for one in events if isinstance(one, kind))


def _advice(
    plan: PlanEvent | None, predictions: Sequence[PredictionEvent], links: Sequence[LinkEvent], events: Sequence[Event]
) -> Iterator[str]:
    """What to do to go faster, the most telling first."""
    if plan is not None and plan.bottleneck:
        yield f"What holds the pipeline back, by the last plan: {plan.bottleneck}."
    step = next((one for one in predictions if one.what == "step_seconds"), None)
    if step is not None and step.measured > step.predicted * (1.0 + OFF):
        yield (
            f"A step took {formatting.seconds(step.measured)} where {formatting.seconds(step.predicted)} was predicted. "
            f"{_slowest(predictions)}While such a run trains, `atoll replan` looks for a plan that fits what is measured."
        )
    if step is not None:
        yield from _thin_links(predictions, links, step.measured)
    recovering = _seconds(events, RecoveredEvent)
    if recovering > MUCH * _seconds(events, StepEvent):
        yield (
            f"Losses of peers took {formatting.duration(recovering)}: a spare peer takes over at once, and a smaller "
            "`durability.snapshot_every` leaves fewer steps to do again."
        )


def _slowest(predictions: Sequence[PredictionEvent]) -> str:
    """The peer that computes furthest beyond its prediction."""
    computing = [one for one in predictions if one.what == "compute_seconds" and one.predicted > 0.0]
    worst = max(computing, key=lambda one: one.measured / one.predicted, default=None)
    if worst is None or worst.measured <= worst.predicted * (1.0 + OFF):
        return ""
    times = f"{worst.measured / worst.predicted:.1f} times as long as measured at joining"
    return f"{worst.peer} computed {times}: something else may run there. "


def _thin_links(predictions: Sequence[PredictionEvent], links: Sequence[LinkEvent], step_seconds: float) -> Iterator[str]:
    codecs = {(one.source, one.target): one.codec for one in links}
    for one in predictions:
        if one.what == "transfer_seconds" and one.measured > BUSY * step_seconds > 0.0:
            codec = codecs.get((one.peer, one.target), "")
            more = "`network.compression: auto` may choose a thinner codec" if codec == "raw" else "it already sends less"
            share = f"{one.measured / step_seconds:.0%} of a step"
            yield f"The link {one.peer} > {one.target} ({codec or 'raw'}) is busy for {share}: {more}."


def comparisons(story: Story) -> list[tuple[str, str, str, str]]:
    """Rows of what was predicted, what was measured, and by how much the first is off."""
    return [_comparison(one) for one in story.predictions]


def _comparison(one: PredictionEvent) -> tuple[str, str, str, str]:
    where = f"{one.peer} > {one.target}" if one.target else one.peer
    names = {
        "step_seconds": ("a step", formatting.seconds),
        "compute_seconds": (f"{where} computes in a step", formatting.seconds),
        "transfer_seconds": (f"{where} is busy in a step", formatting.seconds),
        "memory_bytes": (f"{where} needs", formatting.size),
        "bytes_per_second": (f"{where} carries", formatting.rate),
    }
    label, written = names.get(one.what, (f"{where} {one.what}".strip(), str))
    off = f"{one.predicted / one.measured - 1.0:+.1%}" if one.measured else "-"
    return label, written(one.predicted), written(one.measured), off
