"""Which codec each link uses in each direction: the least lossy one whose work hides behind computing. Pure; no clocks.

Theory of operation. Encoding, sending and decoding run beside computing, each on its own; a pipeline keeps its pace while the
slowest of the three takes no longer for a microbatch than the slowest stage computes for one. What takes longer is paid for
once a microbatch; and once in a step a microbatch passes the link with nothing to hide behind, when the pipeline fills or
drains. Where no core is free for it, coding and a link's packets also take computing's time. All this together is what a codec
*holds back* a step. Every link gets the first codec of its ladder, the least lossy first, that holds the step back by no more
than the best one does, give or take a small part of the step. So a faster link never gets a lossier codec.

Bits are lost only for something: links take lossier codecs when all such changes together shorten the step noticeably, and
steps were seen to wait. They do so at once, and take less lossy ones after several steps that would all have had room
for them. Where a codec is seen to harm the training it is barred for a while, longer each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from atoll.protocol.codec_names import LADDER, LAST_BY_ITSELF

NOTICEABLE = 0.01
"""A smaller part of a step, by estimate, is not worth a single bit. What links hold back is two to three times what is
estimated here where processors are busy: messages also wait for their turn on these (int8 instead of the transform at 20 Mbps
and 40 ms, estimated 2.3 % of a step and measured 8 %)."""
WAITING = 0.03
"""Steps that take longer than computing by a larger part wait for something; by less they differ on a quiet machine too."""
PATIENCE_STEPS = 5
"""Steps in a row that must have room for a less lossy codec. A link that was slow a moment ago often is again."""
MARGIN = 0.7
"""Of what a link seems to carry, this much is counted on when a less lossy codec is considered."""
BARRED_STEPS = 100
"""For how long a codec that did harm is left alone at first: training has changed by then, and what it forgives with it."""

WAKING_SECONDS_A_BYTE = 1e-8
"""A processor's time at each end of a link whose packets come one by one, so that each wakes somebody up: 0.3 core seconds for
16 MB that crossed at 20 Mbps, measured beside the same step without a limit."""
ONE_BY_ONE_BYTES_PER_SECOND = 12.5e6
"""On faster links packets come in bunches, and a second of these costs no more than at this rate: a guess."""

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A codec on a link: ``ratio`` of the raw bytes cross, which are encoded and decoded at these speeds."""

    name: str
    ratio: float = 1.0
    encode_bytes_per_second: float = float("inf")
    decode_bytes_per_second: float = float("inf")

    @property
    def coding_seconds(self) -> float:
        """Of one byte, encoding and decoding together."""
        return 1.0 / self.encode_bytes_per_second + 1.0 / self.decode_bytes_per_second

    @property
    def slower_coding_seconds(self) -> float:
        """Of one byte, where it takes longer."""
        return 1.0 / min(self.encode_bytes_per_second, self.decode_bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a link has to carry for a microbatch, and how fast it is. Of each second of encoding and sending,
    ``encoding_share`` is lost to computing: nothing where a core is free for it, and of a machine all of whose cores compute,
    one of them. The same for receiving and decoding."""

    raw_bytes: float
    bytes_per_second: float
    encoding_share: float = 0.0
    decoding_share: float = 0.0

    def carried(self, rung: Rung) -> tuple[float, float, float]:
        """Seconds a microbatch: encoding, on the wire, decoding."""
        return (
            self.raw_bytes / rung.encode_bytes_per_second,
            self.raw_bytes * rung.ratio / self.bytes_per_second,
            self.raw_bytes / rung.decode_bytes_per_second,
        )

    def stolen(self, rung: Rung) -> float:
        """Seconds a microbatch that computing loses to encoding and decoding, and to sending and receiving."""
        encoding, wire, decoding = self.carried(rung)
        waking = wire * min(self.bytes_per_second, ONE_BY_ONE_BYTES_PER_SECOND) * WAKING_SECONDS_A_BYTE
        return (encoding + waking) * self.encoding_share + (decoding + waking) * self.decoding_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the links are to keep up with: the slowest stage computes for ``microbatch_seconds``, the others together for
    ``fill_seconds``, each time for one microbatch forward and back. ``step_seconds`` is what steps really take, None before
    that was seen."""

    microbatch_seconds: float
    num_microbatches: int
    fill_seconds: float = 0.0
    step_seconds: float | None = None

    @property
    def ideal_seconds(self) -> float:
        """A step with links that take no time."""
        return self.num_microbatches * self.microbatch_seconds + self.fill_seconds

    def held_back(self, rung: Rung, demand: Demand) -> float:
        """By how many seconds a link lengthens a step in one direction."""
        carried = demand.carried(rung)
        late = max(0.0, max(carried) - self.microbatch_seconds)
        return (self.num_microbatches - 1) * late + sum(carried) + self.num_microbatches * demand.stolen(rung)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[Place]):
    """A codec for the link at ``place``, from the next step on, and why."""

    place: Place
    codec: str
    reason: str


def ladder(known: Collection[str], *, floor: str | None = None, ceiling: str | None = None) -> tuple[str, ...]:
    """The codecs to choose from: those that are ``known``, never lossier than ``floor``, never less lossy than ``ceiling``.
    Both are names on LADDER."""
    first = LADDER.index(ceiling) if ceiling is not None else 0
    last = max(first, LADDER.index(floor if floor is not None else LAST_BY_ITSELF))
    return tuple(name for name in LADDER[first : last + 1] if name in known)


def fitting(rungs: Sequence[Rung], demand: Demand, pace: Pace, tolerated_seconds: float) -> int:
    """The number of the least lossy rung that holds a step back by no more than the best one does and what is tolerated."""
    held_back = [pace.held_back(rung, demand) for rung in rungs]
    enough = min(held_back) + tolerated_seconds
    return next(number for number, seconds in enumerate(held_back) if seconds <= enough)


def attainable(pace: Pace, ladders: Iterable[Sequence[Rung]], demands: Iterable[Demand]) -> Pace:
    """The pace that links can keep at best: where one of them is slower than computing whatever its codec, the others need
    lose no bits to be faster than that one."""
    slowest = [min(max(demand.carried(rung)) for rung in rungs) for rungs, demand in zip(ladders, demands, strict=True)]
    return replace(pace, microbatch_seconds=max([pace.microbatch_seconds, *slowest]))


def first_choices(ladders: Sequence[Sequence[Rung]], demands: Sequence[Demand], pace: Pace) -> tuple[Rung, ...]:
    """A rung for each link and direction of a pipeline that has not run yet."""
    pace = attainable(pace, ladders, demands)
    tolerated = NOTICEABLE * pace.ideal_seconds / max(1, len(demands))
    chosen = [rungs[fitting(rungs, demand, pace, tolerated)] for rungs, demand in zip(ladders, demands, strict=True)]
    least = [rungs[0] for rungs in ladders]
    before, after = (
        sum(pace.held_back(rung, demand) for rung, demand in zip(which, demands, strict=True)) for which in (least, chosen)
    )
    return tuple(chosen if before - after > NOTICEABLE * (pace.ideal_seconds + before) else least)


@dataclass(slots=True)
class _Link:
    rungs: tuple[Rung, ...]
    at: int
    roomy_steps: int = 0
    barred: dict[str, int] = field(default_factory=dict)
    times_barred: dict[str, int] = field(default_factory=dict)

    def num_allowed(self, step: int) -> int:
        """How many rungs may be used: those before the first one that is barred, for what follows it is lossier still."""
        barred = (number for number, rung in enumerate(self.rungs) if number and self.barred.get(rung.name, 0) > step)
        return next(barred, len(self.rungs))


class CodecPolicy(Generic[Place]):
    """The codecs of a plan's links, each direction at a place of its own. ``start`` them, then ``decide`` after each step."""

    def __init__(self) -> None:
        self._links: dict[Place, _Link] = {}
        self._step = 0

    def start(self, place: Place, rungs: Sequence[Rung], codec: str) -> None:
        """A link begins with ``codec``, one of ``rungs``. What did harm there under an earlier plan is not forgotten."""
        names = [rung.name for rung in rungs]
        earlier = self._links.get(place)
        link = self._links[place] = _Link(rungs=tuple(rungs), at=names.index(codec))
        if earlier is not None:
            link.barred, link.times_barred = earlier.barred, earlier.times_barred
            link.at = min(link.at, link.num_allowed(self._step) - 1)

    def keep_only(self, places: Collection[Place]) -> None:
        """The other links are no part of the plan any more."""
        self._links = {place: link for place, link in self._links.items() if place in places}

    @property
    def codecs(self) -> Mapping[Place, str]:
        """What each link uses now."""
        return {place: link.rungs[link.at].name for place, link in self._links.items()}

    def decide(
        self, step: int, demands: Mapping[Place, Demand], pace: Pace, harm: Mapping[Place, str] | None = None
    ) -> tuple[Choice[Place], ...]:
        """What changes for ``step``. ``harm`` says of links what their codec does to the training, where it is too much."""
        self._step = step
        changes = [self._bar(place, step, why) for place, why in (harm or {}).items() if self._links[place].at]
        harmed = frozenset(change.place for change in changes)
        seen = {place: demand for place, demand in demands.items() if place in self._links and place not in harmed}
        ladders = [self._links[place].rungs[: self._links[place].num_allowed(step)] for place in seen]
        kept = attainable(pace, ladders, seen.values())
        if pace.step_seconds is not None:
            changes += self._lossier(step, seen, kept, pace.step_seconds - pace.ideal_seconds)
        changes += self._less_lossy(step, seen, kept)
        return tuple(changes)

    def _bar(self, place: Place, step: int, why: str) -> Choice[Place]:
        """The codec does harm: the next less lossy one that may be used."""
        link = self._links[place]
        name = link.rungs[link.at].name
        times = link.times_barred[name] = link.times_barred.get(name, 0) + 1
        link.barred[name] = step + BARRED_STEPS * 2 ** (times - 1)
        link.at, link.roomy_steps = link.num_allowed(step) - 1, 0
        return self._choice(place, f"{name} {why}")

    def _lossier(self, step: int, demands: Mapping[Place, Demand], pace: Pace, waited: float) -> list[Choice[Place]]:
        """``waited`` is how much longer steps take than one without links would."""
        assert pace.step_seconds is not None
        tolerated = NOTICEABLE * pace.ideal_seconds / max(1, len(demands))
        wanted: dict[Place, int] = {}
        gain = 0.0
        for place, demand in demands.items():
            link = self._links[place]
            aim = self._aim(link, step, demand, pace, tolerated)
            if aim > link.at:
                wanted[place] = aim
                gain += pace.held_back(link.rungs[link.at], demand) - pace.held_back(link.rungs[aim], demand)
        if gain <= NOTICEABLE * pace.step_seconds or waited <= WAITING * pace.step_seconds:
            return []
        reasons = {place: _slow(self._links[place].rungs[self._links[place].at], demands[place], pace) for place in wanted}
        for place, aim in wanted.items():
            self._links[place].at, self._links[place].roomy_steps = aim, 0
        return [self._choice(place, reason) for place, reason in reasons.items()]

    def _less_lossy(self, step: int, demands: Mapping[Place, Demand], pace: Pace) -> list[Choice[Place]]:
        tolerated = NOTICEABLE * pace.ideal_seconds / max(1, len(demands))
        changes = []
        for place, demand in demands.items():
            link = self._links[place]
            careful = replace(demand, bytes_per_second=MARGIN * demand.bytes_per_second)
            aim = self._aim(link, step, careful, pace, tolerated)
            link.roomy_steps = link.roomy_steps + 1 if aim < link.at else 0
            if link.roomy_steps >= PATIENCE_STEPS:
                link.at, link.roomy_steps = aim, 0
                changes.append(self._choice(place, _fast(link.rungs[aim], demand, pace)))
        return changes

    def _aim(self, link: _Link, step: int, demand: Demand, pace: Pace, tolerated_seconds: float) -> int:
        return fitting(link.rungs[: link.num_allowed(step)], demand, pace, tolerated_seconds)

    def _choice(self, place: Place, reason: str) -> Choice[Place]:
        link = self._links[place]
        return Choice(place=place, codec=link.rungs[link.at].name, reason=reason)


def _slow(rung: Rung, demand: Demand, pace: Pace) -> str:
    seconds = pace.held_back(rung, demand)
    return f"{rung.name} holds a step back by {seconds:.3g} s, where computing takes {pace.ideal_seconds:.3g} s"


def _fast(rung: Rung, demand: Demand, pace: Pace) -> str:
    seconds = pace.held_back(rung, demand)
    return f"{rung.name} would hold a step back by {seconds:.3g} s, where computing takes {pace.ideal_seconds:.3g} s"
