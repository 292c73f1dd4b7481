"""When a run that goes well should look for a better plan, and when it should leave things as they are. Pure.

Looking costs little and is done beside training; whether a move pays is the planner's to say. What keeps a plan from flapping
stands here: a peer must be slow for several steps in a row; what a look has found not to be worth a move is no reason for
another look before it is much worse; and after a move the run is left alone for some steps, and until what the move cost is a
small part of the time since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atoll.protocol.ids import PeerId, StepNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class RestraintSettings:
    """``slow_factor``: how many times longer than planned a peer must compute, for ``slow_steps`` in a row, to be a reason.
    ``rest_steps`` lie between a move and the next look at least; ``rest_share`` is the most that moves may cost of the time."""

    slow_factor: float = 1.5
    slow_steps: int = 3
    rest_steps: int = 10
    rest_share: float = 0.05


class Restraint:
    """Told of each step, each plan, and each look that led to none."""

    def __init__(self, settings: RestraintSettings) -> None:
        self._settings = settings
        self._slow: dict[PeerId, tuple[int, float]] = {}
        self._borne: dict[PeerId, float] = {}
        self._considered: frozenset[PeerId] = frozenset()
        self._hasty = False
        self._rest_until_step = StepNumber(0)
        self._rest_until = float("-inf")

    def planned(self, peers: Iterable[PeerId], *, hasty: bool = False) -> None:
        """A plan was made in the knowledge of these peers: each one's speed is compared with it from now on. ``hasty``: no
        better one was looked for."""
        self._considered, self._hasty = frozenset(peers), hasty
        self._slow.clear()
        self._borne.clear()

    def moved(self, step: StepNumber, now: float, seconds: float) -> None:
        """The plan was changed after ``step``, which took ``seconds``."""
        self._rest_until_step = StepNumber(step + self._settings.rest_steps)
        self._rest_until = now + seconds / self._settings.rest_share

    def kept(self, peers: Iterable[PeerId]) -> None:
        """A look, in the knowledge of these peers, has found the plan good enough with everybody as fast as now."""
        self._considered, self._hasty = frozenset(peers), False
        self._borne |= {peer: factor for peer, (_, factor) in self._slow.items()}
        self._slow.clear()

    def compared(self, slowdowns: Mapping[PeerId, float]) -> None:
        """After a step: how many times longer than planned each peer computed."""
        limit = self._settings.slow_factor
        slow = {peer: factor for peer, factor in slowdowns.items() if factor > limit * self._borne.get(peer, 1.0)}
        self._slow = {peer: (self._slow.get(peer, (0, 0.0))[0] + 1, factor) for peer, factor in slow.items()}

    def reason(self, step: StepNumber, now: float, present: Iterable[PeerId]) -> str | None:
        """Why a better plan should be looked for after ``step``; None: it should not."""
        if step < self._rest_until_step or now < self._rest_until:
            return None
        slow = [peer for peer, (steps, _) in self._slow.items() if steps >= self._settings.slow_steps]
        if slow:
            worst = max(slow, key=lambda peer: (self._slow[peer][1], peer))
            return f"{worst} computes {self._slow[worst][1]:.1f} times longer than planned"
        joined = sorted(frozenset(present) - self._considered)
        if joined:
            return f"{', '.join(joined)} joined"
        return "the plan was made in haste" if self._hasty else None
