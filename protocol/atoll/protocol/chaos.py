"""A fault plan: what is to go wrong in a run, where and when. The file that people write, and what it comes to; pure.

    seed: 7
    faults:
      - {fault: kill, stage: 1, step: 5, phase: backward, restart_after: 2s}
      - {fault: freeze, peer: peer-2, step: 8, phase: forward, seconds: 60s}
      - {fault: cut, peer: peer-1, from: coordinator, at: 30s, seconds: 20s}
    random:
      - {fault: kill, per_minute: 2, among: [peer-1, peer-2], restart_after: 1s}

A fault happens at a phase, the first time that its victim passes there in its step or later, or some time after the start. Each
happens once, however often its victim starts again. What processes do about it is ``fault_points``'.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from atoll.protocol.errors import JobError
from atoll.protocol.job_errors import WrongValue, job_error, listed, show, suggestion
from atoll.protocol.job_fields import Positive, Section
from atoll.protocol.job_text import parse_mapping
from atoll.protocol.quantities import parse_seconds

COORDINATOR = "coordinator"
"""What a plan calls the coordinator, as it calls a peer by its name."""

FaultKind: TypeAlias = Literal["kill", "freeze", "slow", "cut", "corrupt", "fill_disk"]
Phase: TypeAlias = Literal[
    "joining",
    "rejoining",
    "probing",
    "loading",
    "transferring",
    "forward",
    "backward",
    "averaging",
    "waiting for commit",
    "committing",
    "snapshotting",
]
STEPLESS: frozenset[Phase] = frozenset({"joining", "rejoining", "probing"})
"""Phases in which a peer knows of no step, and has no stage."""
SPOILED: frozenset[Phase] = frozenset({"forward", "backward", "transferring"})
"""Phases in which peers send each other what can be damaged."""
MOST_RANDOM = 500
"""Faults that one random entry comes to; processes are told of them through their environment, which is not boundless."""

_NEEDED: dict[FaultKind, tuple[str, ...]] = {"freeze": ("seconds",), "slow": ("factor",), "cut": ("seconds",)}
_ALLOWED: dict[FaultKind, tuple[str, ...]] = {
    "kill": ("restart_after",),
    "freeze": (),
    "slow": ("seconds",),
    "cut": ("from",),
    "corrupt": ("messages",),
    "fill_disk": ("seconds",),
}
_EXAMPLES = {"seconds": "seconds: 30s", "factor": "factor: 10.0"}


def _seconds(value: object) -> float:
    found = parse_seconds(value) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
        raise WrongValue("", f"{show(value)} is not a time; write for example 30s or 500ms")
    return float(found)


Seconds: TypeAlias = Annotated[float, BeforeValidator(_seconds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process is."""

    process: str
    stage: int | None
    phase: Phase
    step: int
    microbatch: int | None


class _Effect(Section):
    """What goes wrong, and what becomes of the victim."""

    fault: Annotated[FaultKind, Field(examples=["kill"])]
    seconds: Seconds | None = None
    """How long it lasts; without it what can last lasts as long as the process."""
    factor: Annotated[float, Field(gt=1.0, examples=[10.0])] | None = None
    """How many times longer computing takes."""
    messages: Positive | None = None
    """How many messages are damaged; 1 unless given."""
    other: Annotated[str | None, Field(alias="from", examples=["coordinator"])] = None
    """Whom alone the victim is cut from; everybody unless given."""
    restart_after: Seconds | None = None
    """After how long the killed victim is started again; never unless given."""

    @model_validator(mode="after")
    def _keys_of_its_kind(self) -> Self:
        given = {
            "seconds": self.seconds,
            "factor": self.factor,
            "messages": self.messages,
            "from": self.other,
            "restart_after": self.restart_after,
        }
        needed = _NEEDED.get(self.fault, ())
        for key in needed:
            if given[key] is None:
                raise WrongValue(key, f"{self.fault} needs it; write for example {_EXAMPLES[key]}")
        for key, value in given.items():
            if value is not None and key not in needed and key not in _ALLOWED[self.fault]:
                fitting = [kind for kind, keys in _ALLOWED.items() if key in (*keys, *_NEEDED.get(kind, ()))]
                raise WrongValue(key, f"{self.fault} has no {key}; it belongs to {listed(fitting)}")
        return self


class Fault(_Effect):
    """One fault, once: of a ``peer`` (or the coordinator) or of whoever has a ``stage``; at a ``phase`` or at a time."""

    peer: Annotated[str, Field(min_length=1, examples=["peer-1"])] | None = None
    stage: Annotated[int, Field(ge=0, examples=[1])] | None = None
    step: Positive | None = None
    """The first step in which it may happen; any unless given."""
    phase: Annotated[Phase, Field(examples=["backward"])] | None = None
    microbatch: Annotated[int, Field(ge=0)] | None = None
    """Of a forward or backward phase; counted from 0, the first that comes unless given."""
    at: Seconds | None = None
    """After the start of the swarm, in place of a phase."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.peer is None) == (self.stage is None):
            given = "neither is given" if self.peer is None else "both are given"
            raise WrongValue(
                "", f"whom it meets is unclear: {given}; write either peer: NAME (or coordinator) or stage: NUMBER"
            )
        if (self.phase is None) == (self.at is None):
            given = "neither is given" if self.phase is None else "both are given"
            raise WrongValue("", f"when it happens is unclear: {given}; write either phase: NAME or at: TIME")
        if self.at is not None and (self.step is not None or self.microbatch is not None or self.stage is not None):
            raise WrongValue("at", "at that time nobody knows which stage and step it meets; name a peer, and no step")
        return self

    @model_validator(mode="after")
    def _a_phase_of_its_kind(self) -> Self:
        if self.phase in STEPLESS and (self.step is not None or self.stage is not None):
            raise WrongValue("phase", f"a peer that is {self.phase} has no stage and no step; name the peer alone")
        if self.microbatch is not None and self.phase not in ("forward", "backward"):
            raise WrongValue("microbatch", "only forward and backward have microbatches; leave it out")
        if self.fault == "corrupt" and self.phase not in SPOILED:
            raise WrongValue("phase", f"messages are damaged in the phases {listed(sorted(SPOILED))}; choose one")
        if self.fault == "fill_disk" and self.phase != "snapshotting":
            raise WrongValue("phase", "a disk is full when something is written to it; write phase: snapshotting")
        if self.peer == COORDINATOR and self.fault not in ("kill", "freeze"):
            raise WrongValue("fault", f"the coordinator can be killed and frozen, not {self.fault}; name a peer")
        return self

    @property
    def of_swarm(self) -> bool:
        """Whether whoever started the victim does it to it, rather than the victim to itself."""
        return self.at is not None and self.fault in ("kill", "freeze")

    def meets(self, place: Place) -> bool:
        """Whether this is where it happens."""
        return (
            place.phase == self.phase
            and (self.peer is None or self.peer == place.process)
            and (self.stage is None or self.stage == place.stage)
            and (self.step is None or self.step <= place.step)
            and (self.microbatch is None or self.microbatch == place.microbatch)
        )

    def describe(self) -> str:
        """``kill of stage 1 at step 5, backward``."""
        whom = self.peer if self.peer is not None else f"stage {self.stage}"
        what = f"{self.fault.replace('_', ' ')} of {whom}"
        if self.at is not None:
            return f"{what} after {self.at:.1f} s"
        return f"{what} at {f'step {self.step}, ' if self.step is not None else ''}{self.phase}"


class RandomFaults(_Effect):
    """Faults at random times, so many a minute on average, until there were ``count``."""

    per_minute: Annotated[float, Field(gt=0.0, examples=[1.0])]
    among: Annotated[tuple[str, ...], Field(strict=False, min_length=1, examples=[["peer-1", "coordinator"]])] | None = None
    """Who may be met, by name; every peer unless given."""
    count: Annotated[int, Field(ge=1, le=MOST_RANDOM)] = 100

    @model_validator(mode="after")
    def _possible_at_a_time(self) -> Self:
        if self.fault in ("corrupt", "fill_disk"):
            raise WrongValue("fault", f"{self.fault} needs a phase; write it under faults, once for each time")
        if COORDINATOR in (self.among or ()) and self.fault not in ("kill", "freeze"):
            raise WrongValue("among", f"the coordinator can be killed and frozen, not {self.fault}; name peers")
        return self

    def drawn(self, peers: Sequence[str], draws: random.Random) -> list[Fault]:
        """The faults that this comes to, where ``peers`` are all there are."""
        found, now = [], 0.0
        effect = self.model_dump(include=set(_Effect.model_fields), exclude_none=True, by_alias=True)
        for _ in range(self.count):
            now += draws.expovariate(self.per_minute / 60.0)
            found.append(Fault(**effect, peer=draws.choice(self.among or tuple(peers)), at=now))
        return found


class ChaosPlan(Section):
    """All of a file."""

    seed: int = 0
    """Of the random faults: the same seed, the same faults."""
    faults: Annotated[tuple[Fault, ...], Field(strict=False)] = ()
    random: Annotated[tuple[RandomFaults, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.faults and not self.random:
            raise WrongValue("", "nothing goes wrong in it; write at least one entry under faults or random")
        return self

    def drawn(self, peers: Sequence[str]) -> tuple[Fault, ...]:
        """Every fault, the random ones drawn; ``peers`` are those of the swarm. Raises JobError for one that is not there."""
        known = [*peers, COORDINATOR]
        for path, name in self._names():
            if name not in known:
                raise JobError(path, f"there is no peer {name!r}; {suggestion(name, known)}")
        draws = random.Random(self.seed)
        return (*self.faults, *(fault for entry in self.random for fault in entry.drawn(peers, draws)))

    def _names(self) -> Iterable[tuple[str, str]]:
        for index, fault in enumerate(self.faults):
            for key, name in (("peer", fault.peer), ("from", fault.other)):
                if name is not None:
                    yield f"faults.{index}.{key}", name
        for index, entry in enumerate(self.random):
            for name in (*(entry.among or ()), *filter(None, (entry.other,))):
                yield f"random.{index}", name


def parse_chaos(values: dict[str, Any]) -> ChaosPlan:
    """The plan that ``values`` describe. Raises JobError."""
    try:
        return ChaosPlan.model_validate(values)
    except ValidationError as error:
        raise job_error(error, ChaosPlan) from error


def load_chaos(path: Path) -> ChaosPlan:
    """Read the fault plan ``path``. Raises JobError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror
        raise JobError("", f"cannot read the fault plan {str(path)!r}: {reason}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise JobError("", f"the fault plan {str(path)!r} is not UTF-8 text; give the path of a YAML file") from error
    values = parse_mapping(
        text, f"the fault plan {str(path)!r}", "a fault plan", "has the key faults or random, and maybe seed"
    )
    return parse_chaos(values)
