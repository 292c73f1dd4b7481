"""The processors of a machine on which several stages compute: who gets how much of them while there are too few.

While the works that are going on want more threads than the machine has cores, each proceeds at cores / threads of its speed;
so does an operating system share processors among threads that always have something to do. A machine whose stages can never
want too many is not here at all: their works take what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Schedule = Callable[[float, int, int], None]
"""``schedule(when, stage, version)``: the work of ``stage`` ends at ``when`` unless its version is another by then."""


class Tenant(Protocol):
    """What computes on a machine: a stage, or a peer that may get one."""

    @property
    def machine(self) -> str: ...

    @property
    def cores(self) -> int: ...

    @property
    def threads(self) -> int: ...


@dataclass(slots=True)
class Work:
    """What a stage is doing; ``remaining`` in seconds at full speed, as of ``since``."""

    stage: int
    threads: int
    remaining: float
    since: float
    version: int


@dataclass(slots=True, eq=False)
class Machine:
    """A machine with too few ``cores`` for all its stages."""

    cores: int
    works: dict[int, Work] = field(default_factory=dict)
    speed: float = 1.0


class Processors:
    """All machines that can be short. The owner calls ``start``, and ``ended`` when a time it was told of has come."""

    def __init__(self, stages: Sequence[Tenant], schedule: Schedule) -> None:
        self._stages = stages
        self._schedule = schedule
        self._version = 0
        self._machines: dict[int, Machine] = {}
        for members, cores in crowded(stages):
            machine = Machine(cores=cores)
            self._machines.update(dict.fromkeys(members, machine))

    def shared(self, stage: int) -> bool:
        """Whether the stage may have to share its processors."""
        return stage in self._machines

    def start(self, stage: int, seconds: float, now: float) -> None:
        """A work that takes ``seconds`` at full speed begins."""
        machine = self._machines[stage]
        threads = threads_of(self._stages[stage], machine.cores)
        self._catch_up(machine, now)
        machine.works[stage] = Work(stage, threads, seconds, now, self._version)
        self._share(machine, now)

    def ended(self, stage: int, version: int, now: float) -> bool:
        """Whether the work of ``stage`` has ended; an outdated time says no."""
        machine = self._machines[stage]
        work = machine.works.get(stage)
        if work is None or work.version != version:
            return False
        self._catch_up(machine, now)
        del machine.works[stage]
        self._share(machine, now)
        return True

    def _catch_up(self, machine: Machine, now: float) -> None:
        for work in machine.works.values():
            work.remaining = max(0.0, work.remaining - machine.speed * (now - work.since))
            work.since = now

    def _share(self, machine: Machine, now: float) -> None:
        """New ends for all works, each at the speed that there is now."""
        wanted = sum(work.threads for work in machine.works.values())
        machine.speed = min(1.0, machine.cores / wanted) if wanted else 1.0
        for work in machine.works.values():
            self._version += 1
            work.version = self._version
            self._schedule(now + work.remaining / machine.speed, work.stage, work.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """A tenant's machine, by number, -1 where its processors always suffice; ``share`` is the part of them that it takes."""

    machine: int = -1
    share: float = 0.0


def crowds_of(tenants: Sequence[Tenant]) -> list[Crowd]:
    """Of each tenant, if all computed at the same time."""
    found = [Crowd()] * len(tenants)
    for number, (members, cores) in enumerate(crowded(tenants)):
        for member in members:
            found[member] = Crowd(machine=number, share=threads_of(tenants[member], cores) / cores)
    return found


def crowded(tenants: Sequence[Tenant]) -> list[tuple[list[int], int]]:
    """The tenants of each machine on which they could want more threads than there are cores, and these."""
    return [(members, cores) for members, wanted, cores in _machines(tenants) if wanted > cores]


def full(tenants: Sequence[Tenant]) -> list[int]:
    """The tenants of machines on which no core is free while all compute."""
    return sorted(member for members, wanted, cores in _machines(tenants) if wanted >= cores for member in members)


def _machines(tenants: Sequence[Tenant]) -> list[tuple[list[int], int, int]]:
    """The tenants of each machine that has a name, the threads that they want, and its cores."""
    machines: dict[str, list[int]] = {}
    for index, tenant in enumerate(tenants):
        if tenant.machine and tenant.cores > 0:
            machines.setdefault(tenant.machine, []).append(index)
    found = []
    for members in machines.values():
        on_it = [tenants[member] for member in members]
        cores = max(tenant.cores for tenant in on_it)  # what the best informed of them says
        found.append((members, sum(threads_of(tenant, cores) for tenant in on_it), cores))
    return found


def threads_of(tenant: Tenant, cores: int) -> int:
    """How many threads it keeps busy; more than there are cores were there already when its speed was measured."""
    return min(tenant.threads, cores)
