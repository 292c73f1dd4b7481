"""Whether a run that goes on should change its plan: what the present one is worth by now, and what a better one costs to
move to.

Pure and deterministic. A new plan is searched for with the seconds of moving in it: each step of a layout counts as longer by
its move, spread over the steps that are left. So a run near its end keeps what it has, and of two plans that are equally fast
the one that moves less wins. A gain below ``least_gain`` of a step is not taken, for measurements waver.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.coordinator.planning.costs import allowed_bytes
from atoll.coordinator.planning.layouts import Layout, with_groups
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.planner import Planned, PlanRequest, describe, predictor_of, situation_of
from atoll.coordinator.planning.prediction import Predictor, seats
from atoll.coordinator.planning.refusal import refuse
from atoll.coordinator.planning.search import search
from atoll.coordinator.planning.segments import Segments
from atoll.protocol.ids import PeerId
from atoll.protocol.quantities import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """What a change of plan costs. ``state_copies`` is bytes of state for each byte of parameters; ``restart_seconds`` what any
    change takes, whatever moves, a guess by default; ``least_gain`` the part of a step that must be gained."""

    state_copies: int = 3
    restart_seconds: float = 2.0
    least_gain: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMove:
    """Bytes of state that ``target`` fetches from ``source``; None: from nobody, for its holder is not there."""

    source: PeerId | None
    target: PeerId
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replanned:
    """The decision. ``planned`` is the plan to follow: the present one, as it is predicted now, unless ``move``."""

    move: bool
    planned: Planned
    moves: tuple[StateMove, ...]
    move_seconds: float
    reason: str


def replan(request: PlanRequest, current: Plan, *, cost: MoveCost, steps_left: int) -> Replanned:
    """Keep ``current`` or move, judged by what ``request`` knows now. Raises PlacementError when nothing fits any more."""
    situation = situation_of(request)
    predictor = predictor_of(situation, frozenset(current.peers))
    present = _Present(predictor, current, cost)
    steps = max(1, steps_left)
    found = search(
        predictor,
        request.constraints.num_stages,
        start=present.layout,
        penalty=lambda layout: present.move_seconds(layout) / steps,
    )
    if found is None:
        raise refuse(predictor, request.constraints)
    move_seconds = present.move_seconds(found.layout)
    best = describe(situation, predictor, found.layout, found.in_flight)
    if present.layout is None or present.obstacle:
        return Replanned(
            move=True,
            planned=best,
            moves=present.moves(found.layout),
            move_seconds=move_seconds,
            reason=f"the present plan is not possible any more: {present.obstacle}",
        )
    kept = describe(situation, predictor, present.layout, present.in_flight)
    gain = (kept.step_seconds - best.step_seconds) * steps_left - move_seconds
    enough = kept.step_seconds - best.step_seconds >= cost.least_gain * kept.step_seconds
    move = gain > 0.0 and enough
    return Replanned(
        move=move,
        planned=best if move else kept,
        moves=present.moves(found.layout) if move else (),
        move_seconds=move_seconds if move else 0.0,
        reason=_reason(kept.step_seconds, best.step_seconds, move_seconds, steps_left, enough=enough, pays=gain > 0.0),
    )


def _reason(now: float, then: float, move_seconds: float, steps_left: int, *, enough: bool, pays: bool) -> str:
    steps = "1 step is left" if steps_left == 1 else f"{steps_left} steps are left"
    change = f"{format_seconds(then)} a step instead of {format_seconds(now)}"
    if not enough:
        return f"no other plan is noticeably faster than {format_seconds(now)} a step"
    if not pays:
        return f"{change} does not pay for a move of {format_seconds(move_seconds)}, for {steps}"
    return f"{change}, after a move of {format_seconds(move_seconds)}; {steps}"


def bounds_of(plan: Plan, segments: Segments) -> tuple[int, ...]:
    """Where the stages of a plan begin and end, in segments."""
    positions = {node: number for number, node in enumerate(segments.positions)}
    return (0, *(positions[stage.end] for stage in plan.stages))


class _Present:
    """The plan in force among the peers that are there. ``obstacle`` says why it cannot stay."""

    def __init__(self, predictor: Predictor, current: Plan, cost: MoveCost) -> None:
        self._predictor = predictor
        self._cost = cost
        self._places = {peer.name: index for index, peer in enumerate(predictor.peers)}
        bounds = bounds_of(current, predictor.segments)
        self._holders: list[tuple[PeerId, ...]] = []
        for stage, first, end in zip(current.stages, bounds[:-1], bounds[1:], strict=True):
            here = tuple(peer for peer in stage.replicas if peer in self._places)
            self._holders += [here] * (end - first)
        self.layout: Layout | None = None
        self.in_flight: tuple[int, ...] = ()
        gone = [stage.replicas for stage in current.stages if not set(stage.replicas) & set(self._places)]
        self.obstacle = f"{', '.join(peer for replicas in gone for peer in replicas)} left" if gone else ""
        if not gone:
            left = [[peer for peer in stage.replicas if peer in self._places] for stage in current.stages]
            self.in_flight = tuple(
                stage.of(peer).in_flight for stage, here in zip(current.stages, left, strict=True) for peer in here
            )
            layout = with_groups(
                tuple(tuple(self._places[peer] for peer in here) for here in left),
                bounds,
                tuple(stage.recompute for stage in current.stages),
            )
            self.obstacle = self._obstacle(layout)
            self.layout = layout if predictor.fits(layout) else None

    def _obstacle(self, layout: Layout) -> str:
        """What forbids to go on: memory that became smaller, or a wish that is not kept."""
        predictor, constraints = self._predictor, self._predictor.constraints
        needs = predictor.memory_bytes(layout, self.in_flight)
        for seat, need in zip(seats(layout), needs, strict=True):
            offer = predictor.peers[seat.peer]
            allowed = allowed_bytes(offer, constraints)
            if need > allowed:
                return f"stage {seat.stage} needs {format_bytes(need)} and {offer.name} can give {format_bytes(allowed)}"
        return "" if predictor.fits(layout) else "it does not keep the pins, the trusted ends or the wish to recompute"

    def moves(self, layout: Layout) -> tuple[StateMove, ...]:
        """What each peer of ``layout`` must fetch, and from whom: of several replicas from the one that sends it fastest."""
        sizes: dict[tuple[PeerId | None, PeerId], float] = {}
        parameters = self._predictor.segments.parameter_bytes
        for seat in seats(layout):
            target = self._predictor.peers[seat.peer].name
            for segment in range(seat.first, seat.end):
                holders = self._holders[segment]
                size = self._cost.state_copies * (parameters[segment + 1] - parameters[segment])
                if target not in holders and size > 0.0:
                    pair = self._nearest(holders, seat.peer), target
                    sizes[pair] = sizes.get(pair, 0.0) + size
        return tuple(
            StateMove(source=source, target=target, num_bytes=size)
            for (source, target), size in sorted(sizes.items(), key=lambda item: (item[0][1], item[0][0] or ""))
        )

    def _nearest(self, holders: tuple[PeerId, ...], target: int) -> PeerId | None:
        rate = self._predictor.network.rate
        return max(holders, key=lambda holder: float(rate[self._places[holder], target]), default=None)

    def move_seconds(self, layout: Layout) -> float:
        """How long the run stands still for a move to ``layout``; 0 for the present one. All transfers run at once."""
        if layout == self.layout:
            return 0.0
        network = self._predictor.network
        sent: dict[int, float] = {}
        received: dict[int, float] = {}
        slowest = 0.0
        for move in self.moves(layout):
            if move.source is None:
                continue
            one, other = self._places[move.source], self._places[move.target]
            sent[one] = sent.get(one, 0.0) + move.num_bytes
            received[other] = received.get(other, 0.0) + move.num_bytes
            slowest = max(slowest, move.num_bytes / float(network.rate[one, other]) + 2.0 * float(network.latency[one, other]))
        lines = [size / float(network.upload[peer]) for peer, size in sent.items()]
        lines += [size / float(network.download[peer]) for peer, size in received.items()]
        return self._cost.restart_seconds + max([slowest, *lines])
