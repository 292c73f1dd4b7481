"""Which peer runs which part of the graph. Pure: the same request gives the same plan.

Theory. The graph may be cut at the positions that the tracer lists. Stages are contiguous, one peer each, peers in the order
of the request, a peer may be left out as a spare. An exact dynamic programme over (stages still to place, peers still to use,
first position) minimises the time of the slowest stage, which bounds the pipeline's throughput. A second pass, among all
plans whose slowest stage is within :data:`SLACK` of that, takes the one with the fewest bytes across its cuts, then the
evenest one.

A stage's memory is what it always holds plus what each microbatch in flight holds. A stage that is ``d`` from the end (the
last is 1) wants ``2 d - 1`` in flight: ``d`` keep a pipeline with equal halves busy, the others hide the transfers. With less
memory it holds fewer, recomputes its activations where that is allowed, and at last idles for want of microbatches; the time
of each is in the cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import NodeIndex, PeerId, StageIndex

SLACK = 1.05
# Times the FLOPs of a forward pass: a backward pass costs two, computing the activations again one more.
FORWARD_AND_BACKWARD = 3.0
WITH_RECOMPUTATION = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOffer:
    """What a peer said at joining: its measured speed and the memory it may use."""

    name: PeerId
    flops_per_second: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes that a stage needs: ``fixed_bytes`` always, ``microbatch_bytes`` more for each microbatch in flight."""

    fixed_bytes: int
    microbatch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The graph between its possible cuts: segment ``k`` holds the nodes from ``positions[k]`` up to ``positions[k + 1]``.

    ``flops[k]`` are the forward FLOPs of all nodes before ``positions[k]``, ``crossing_bytes[k]`` what a cut there sends
    forward, both for one microbatch. ``memory(i, j, recompute)`` is the need of a stage from position ``i`` to position
    ``j``."""

    positions: tuple[NodeIndex, ...]
    flops: tuple[float, ...]
    crossing_bytes: tuple[int, ...]
    memory: Callable[[int, int, bool], StageMemory]

    @property
    def num_segments(self) -> int:
        return len(self.positions) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """``None`` leaves a choice to the placement. ``memory_share`` is how much of a peer's offer a plan may use; the rest is
    headroom."""

    segments: Segments
    peers: tuple[PeerOffer, ...]
    num_microbatches: int
    num_stages: int | None = None
    in_flight: int | None = None
    recompute: bool | None = None
    memory_share: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One way to run a range of segments on one peer."""

    in_flight: int
    recompute: bool
    memory_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Choice:
    """Peer number ``peer`` runs positions ``first`` to ``end`` as the stage that is ``distance`` from the end."""

    peer: int
    first: int
    end: int
    distance: int


_Cost: TypeAlias = tuple[float, ...]


def place(request: PlacementRequest) -> Plan:
    """The best placement for ``request``. Raises PlacementError with a sentence that says what is missing, and how much."""
    return _Placement(request).plan()


class _Placement:
    def __init__(self, request: PlacementRequest) -> None:
        self._request = request
        self._segments = request.segments
        self._offers = request.peers
        self._options: dict[_Choice, _Option | None] = {}

    def plan(self) -> Plan:
        most = min(len(self._offers), self._segments.num_segments)
        wanted = self._request.num_stages
        if wanted is not None and wanted > most:
            raise PlacementError(self._too_many_stages(wanted))
        if most == 0:
            raise PlacementError("no peer has joined; start one with atoll-peer join")
        counts = range(1, most + 1) if wanted is None else range(wanted, wanted + 1)
        solutions = (self._solve(count, self._slowest, max, lambda choice: (self._least_seconds(choice),)) for count in counts)
        fastest = min(filter(None, solutions), default=None)
        if fastest is None:
            raise self._does_not_fit(counts)
        limit = fastest[0][0] * SLACK

        def narrow(choice: _Choice) -> _Cost | None:
            option = self._option(choice) if self._least_seconds(choice) <= limit else None
            if option is None or option.seconds > limit:
                return None
            return (float(self._segments.crossing_bytes[choice.first]), option.seconds**2)

        best = min(solution for count in counts if (solution := self._solve(count, narrow, _add)) is not None)
        return self._as_plan(best[1])

    def _slowest(self, choice: _Choice) -> _Cost | None:
        option = self._option(choice)
        return None if option is None else (option.seconds,)

    def _least_seconds(self, choice: _Choice) -> float:
        """A bound from below for the time of any option."""
        flops = self._segments.flops[choice.end] - self._segments.flops[choice.first]
        return flops * FORWARD_AND_BACKWARD / max(self._offers[choice.peer].flops_per_second, 1.0)

    def _solve(
        self,
        count: int,
        cost: Callable[[_Choice], _Cost | None],
        combine: Callable[[_Cost, _Cost], _Cost],
        at_least: Callable[[_Choice], _Cost] = lambda _: (),
    ) -> tuple[_Cost, tuple[tuple[int, int, int, int], ...]] | None:
        """The cheapest way to run everything in exactly ``count`` stages; ``cost`` is None for what is impossible.

        ``combine`` must be monotone, as a maximum or a sum is. Equal costs go to the earlier peers and the earlier cuts.
        ``at_least`` is a bound that is quicker to know than the cost.
        """
        end, num_peers = self._segments.num_segments, len(self._offers)

        @cache
        def best(distance: int, peer: int, first: int) -> tuple[_Cost, tuple[tuple[int, int, int, int], ...]] | None:
            """Positions ``first`` to the end in ``distance`` stages on peers ``peer`` and later."""
            if distance > num_peers - peer or distance > end - first:
                return None
            found = best(distance, peer + 1, first)
            for stop in range(first + 1, end - distance + 2) if distance > 1 else (end,):
                choice = _Choice(peer, first, stop, distance)
                if found is not None and at_least(choice) > found[0]:
                    break  # what follows has more to do
                own = cost(choice)
                if own is None or (found is not None and own > found[0]):
                    continue
                rest = best(distance - 1, peer + 1, stop) if distance > 1 else (own, ())
                if rest is None:
                    continue
                candidate = (combine(own, rest[0]) if distance > 1 else own, ((peer, first, stop, distance), *rest[1]))
                found = candidate if found is None or candidate < found else found
            return found

        return best(count, 0, 0)

    def _option(self, choice: _Choice) -> _Option | None:
        if choice not in self._options:
            self._options[choice] = self._fastest_that_fits(choice)
        return self._options[choice]

    def _fastest_that_fits(self, choice: _Choice) -> _Option | None:
        offer = self._offers[choice.peer]
        allowed = self._allowed_bytes(offer)
        wanted = self._request.recompute
        options = []
        for recompute in (False, True) if wanted is None else (wanted,):
            memory = self._segments.memory(choice.first, choice.end, recompute)
            in_flight = self._in_flight(choice.distance, memory, allowed)
            if in_flight is None:
                continue
            flops = self._segments.flops[choice.end] - self._segments.flops[choice.first]
            passes = WITH_RECOMPUTATION if recompute else FORWARD_AND_BACKWARD
            enough = min(choice.distance, self._request.num_microbatches)
            seconds = flops * passes / max(offer.flops_per_second, 1.0) * max(1.0, enough / in_flight)
            need = memory.fixed_bytes + in_flight * memory.microbatch_bytes
            options.append(_Option(in_flight=in_flight, recompute=recompute, memory_bytes=need, seconds=seconds))
        return min(options, key=lambda option: option.seconds, default=None)

    def _in_flight(self, distance: int, memory: StageMemory, allowed: int) -> int | None:
        """How many microbatches the stage may hold, None when not even one fits (or not the number asked for)."""
        room = allowed - memory.fixed_bytes
        fits = room // memory.microbatch_bytes if memory.microbatch_bytes > 0 else self._request.num_microbatches
        if room < 0 or fits < 1:
            return None
        if self._request.in_flight is not None:
            wanted = min(self._request.in_flight, self._request.num_microbatches)
            return wanted if wanted <= fits else None
        return min(self._request.num_microbatches, 2 * distance - 1, fits)

    def _allowed_bytes(self, offer: PeerOffer) -> int:
        return int(offer.memory_bytes * self._request.memory_share)

    def _least_bytes(self, choice: _Choice) -> int:
        """The memory of the most frugal way to run ``choice``."""
        in_flight = min(self._request.in_flight or 1, self._request.num_microbatches)
        wanted = self._request.recompute
        needs = []
        for recompute in (False, True) if wanted is None else (wanted,):
            memory = self._segments.memory(choice.first, choice.end, recompute)
            needs.append(memory.fixed_bytes + in_flight * memory.microbatch_bytes)
        return min(needs)

    def _as_plan(self, choices: tuple[tuple[int, int, int, int], ...]) -> Plan:
        stages = []
        for index, numbers in enumerate(choices):
            choice = _Choice(*numbers)
            option = self._option(choice)
            assert option is not None, "a solution holds only choices that fit"
            last = choice.end == self._segments.num_segments
            stages.append(
                StagePlan(
                    stage=StageIndex(index),
                    peer=self._offers[choice.peer].name,
                    first=self._segments.positions[choice.first],
                    end=self._segments.positions[choice.end],
                    in_flight=option.in_flight,
                    recompute=option.recompute,
                    memory_bytes=option.memory_bytes,
                    microbatch_seconds=option.seconds,
                    sent_bytes=0 if last else self._segments.crossing_bytes[choice.end],
                )
            )
        seconds = [stage.microbatch_seconds for stage in stages]
        used = {stage.peer for stage in stages}
        return Plan(
            stages=tuple(stages),
            spares=tuple(offer.name for offer in self._offers if offer.name not in used),
            # The pipeline fills once, and then the slowest stage sets the pace.
            step_seconds=sum(seconds) + (self._request.num_microbatches - 1) * max(seconds),
        )

    def _too_many_stages(self, wanted: int) -> str:
        if wanted > len(self._offers):
            missing = wanted - len(self._offers)
            return (
                f"plan.stages asks for {wanted} stages, but only {_count(len(self._offers), 'peer')} joined; "
                f"start {missing} more, or lower plan.stages"
            )
        most = self._segments.num_segments
        return f"plan.stages asks for {wanted} stages, but the model can be cut into {most} at most; lower plan.stages"

    def _does_not_fit(self, counts: range) -> PlacementError:
        """Says how far the best attempt is from fitting: the one with the fewest bytes missing in all."""

        def missing(choice: _Choice) -> _Cost:
            return (float(max(0, self._least_bytes(choice) - self._allowed_bytes(self._offers[choice.peer]))),)

        solutions = [solution for count in counts if (solution := self._solve(count, missing, _add)) is not None]
        total, numbers = min(solutions)
        parts = []
        for index, choice in enumerate(_Choice(*item) for item in numbers):
            offer = self._offers[choice.peer]
            need, allowed = self._least_bytes(choice), self._allowed_bytes(offer)
            if need > allowed:
                parts.append(
                    f"stage {index} needs {format_bytes(need)} and {offer.name} can give {format_bytes(allowed)} "
                    f"({self._request.memory_share:.0%} of what it offers)"
                )
        fix = "let another peer join, raise --max-memory, or lower training.microbatch"
        if self._request.recompute is False:
            fix += " or set plan.recompute to auto"
        bytes_missing = int(total[0])
        sentence = f"the model does not fit: {format_bytes(bytes_missing)} more memory needed ({'; '.join(parts)}); {fix}"
        return PlacementError(sentence, bytes_missing)


def _add(one: _Cost, other: _Cost) -> _Cost:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(count: int) -> str:
    """``count`` bytes for a person: ``3.2 GB``, ``512 kB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
