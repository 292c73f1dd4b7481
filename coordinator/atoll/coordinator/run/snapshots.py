"""Which snapshots there are and who has which part of them. A part of the state machine; pure.

A snapshot is the state after a committed step. Each peer keeps what it has of it on its own disk, as one part: what its stage
held, and copies of what others hold. A snapshot is *complete* when the peers that are here have every essential name of it,
and *safe* when each of these is on the disks of as many peers as the job asks for.

A run that goes back to a snapshot and does steps again may, with codecs that lose bits, arrive at slightly other numbers; parts
of the two must never be put together. So a step is told apart by its *line*, a number that changes when the run goes back. A
disk does not know lines: a peer that takes a snapshot of a step overwrites what it had of that step, and what a disk has counts
for no line that is not certain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.protocol.ids import PeerId, StepNumber


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Moment:
    """The state after a step, of one line of steps. The later one of two has the greater step."""

    step: StepNumber
    line: int = 0


FIRST_VALUES = Moment(step=StepNumber(0))
THE_STORE = PeerId("the store")
"""Who has what lies in the job's store; no peer is called so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one peer has of a snapshot on its disk; of ``names``, parameters and buffers, everything."""

    moment: Moment
    names: frozenset[str]
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """What a peer that joins says it has on its disk of a step of this run."""

    step: StepNumber
    names: frozenset[str]
    num_bytes: int = 0


class Snapshots:
    """``essential`` are the names that training changes, ``copies`` how many peers beside the first are to have each. Parts of
    peers that are away are remembered: they come back with the peer. ``stored`` is what a store is being filled with. Steps up
    to ``redone_until`` have been done on several lines, or may have been."""

    def __init__(self, copies: int = 0) -> None:
        self.essential: frozenset[str] = frozenset()
        self.copies = copies
        self._lines: dict[StepNumber, frozenset[int]] = {}
        self._parts: dict[PeerId, dict[StepNumber, Part]] = {}
        self._here: set[PeerId] = set()
        self.stored: Moment | None = None
        self.redone_until = StepNumber(0)

    # What happens

    def ordered(self, moment: Moment) -> None:
        """Peers are told to take a snapshot of that moment."""
        self._lines[moment.step] = self._lines.get(moment.step, frozenset()) | {moment.line}

    def taken(self, peer: PeerId, part: Part) -> None:
        """The peer has a part on its disk, beside what it has of the same moment; what it had of another line of that step is
        overwritten."""
        older = self._parts.setdefault(peer, {}).get(part.moment.step)
        if older is not None and older.moment == part.moment:
            names = older.names | part.names
            part = Part(moment=part.moment, names=names, num_bytes=older.num_bytes + part.num_bytes)
        self._parts[peer][part.moment.step] = part

    def joined(self, peer: PeerId, held: Iterable[HeldPart]) -> None:
        """The peer is here, with this on its disk. Of which line a part is must be known: from what was heard of it before, or
        because the step was done only once."""
        self._here.add(peer)
        known = self._parts.pop(peer, {})
        sure = peer == THE_STORE
        found = {item.step: part for item in held if (part := self._recognised(item, known.get(item.step), sure)) is not None}
        if found:
            self._parts[peer] = found

    def gone(self, peer: PeerId) -> None:
        """The peer is away, and its parts with it."""
        self._here.discard(peer)

    def dropped(self, keep: Iterable[StepNumber]) -> None:
        """Everybody was told to delete the snapshots of all other steps; who is away hears it when it is back."""
        kept = frozenset(keep)
        for peer, parts in list(self._parts.items()):
            if peer != THE_STORE:  # it is rotated by itself
                self._parts[peer] = {step: part for step, part in parts.items() if step in kept}
            if not self._parts[peer]:
                del self._parts[peer]
        known = kept.union(self._parts.get(THE_STORE, ()))
        self._lines = {step: lines for step, lines in self._lines.items() if step in known}

    def damaged(self, peer: PeerId, step: StepNumber) -> None:
        """What the peer had of that step turned out to be of no use."""
        self._parts.get(peer, {}).pop(step, None)

    def remember(self, moments: Iterable[Moment], parts: Iterable[tuple[PeerId, Part]]) -> None:
        """What an earlier coordinator of this run has written down; whoever has a part is away until it joins."""
        for moment in moments:
            self.ordered(moment)
            if moment.line != FIRST_VALUES.line:
                self.redone_until = max(self.redone_until, moment.step)
        for peer, part in parts:
            # Whoever was told to take the step once more may have done so without a word.
            if part.moment.line == max(self._lines.get(part.moment.step, (part.moment.line,))):
                self.taken(peer, part)

    # What there is

    @property
    def steps(self) -> frozenset[StepNumber]:
        """Of all snapshots that anybody has a part of, or was told to take."""
        return frozenset(self._lines).union(*self._parts.values())

    def has(self, peer: PeerId, moment: Moment) -> bool:
        """Whether the peer has a part of that snapshot."""
        part = self._parts.get(peer, {}).get(moment.step)
        return part is not None and part.moment == moment

    def parts(self) -> Iterable[tuple[PeerId, Part]]:
        """All that is known, of peers that are away too."""
        return [(peer, part) for peer, parts in self._parts.items() for part in parts.values()]

    def holders(self, moment: Moment, *, also_away: bool = False) -> dict[str, tuple[PeerId, ...]]:
        """For each name of a snapshot, who has it on its disk."""
        found: dict[str, list[PeerId]] = {}
        for peer in sorted(self._parts):
            if self.has(peer, moment) and (also_away or peer in self._here):
                for name in self._parts[peer][moment.step].names:
                    found.setdefault(name, []).append(peer)
        return {name: tuple(peers) for name, peers in found.items()}

    def missing(self, moment: Moment, *, also_away: bool = False) -> tuple[str, ...]:
        """The essential names of a snapshot that nobody has."""
        return tuple(sorted(self.essential.difference(self.holders(moment, also_away=also_away))))

    def is_complete(self, moment: Moment, *, also_away: bool = False) -> bool:
        return bool(self.essential) and not self.missing(moment, also_away=also_away)

    def is_safe(self, moment: Moment) -> bool:
        holders = self.holders(moment)
        return bool(self.essential) and all(len(holders.get(name, ())) > self.copies for name in self.essential)

    def outlives_a_loss(self, moment: Moment) -> bool:
        """Whether whoever is lost next leaves it complete."""
        holders = self.holders(moment)
        return bool(self.essential) and all(len(holders.get(name, ())) > 1 for name in self.essential)

    def newest_complete(self, *, also_away: bool = False) -> Moment | None:
        """``also_away``: as if everybody who was ever here came back."""
        return max((one for one in self._moments() if self.is_complete(one, also_away=also_away)), default=None)

    def newest_safe(self) -> Moment | None:
        return max(filter(self.is_safe, self._moments()), default=None)

    def was_redone(self, step: StepNumber) -> bool:
        """Whether disks may have that step of several lines."""
        return step <= self.redone_until

    def num_bytes(self, moment: Moment) -> int:
        """On the disks of those who are here, copies included."""
        return sum(part.num_bytes for peer, part in self.parts() if peer in self._here and part.moment == moment)

    def worth_keeping(self) -> frozenset[StepNumber]:
        """The steps whose snapshots must stay: the newest complete one, the newest safe one, the newest that outlives the loss
        of a peer, and whatever is newer than the complete one: it is being taken, or could become complete when somebody comes
        back."""
        complete, safe = self.newest_complete(), self.newest_safe()
        if complete is None:
            return self.steps
        lasting = max(filter(self.outlives_a_loss, self._moments()), default=None)
        kept = {one.step for one in (complete, safe, lasting, self.stored) if one is not None}
        return frozenset(step for step in self.steps if step > complete.step or step in kept)

    def _moments(self) -> set[Moment]:
        return {part.moment for parts in self._parts.values() for part in parts.values()}

    def _recognised(self, held: HeldPart, known: Part | None, of_store: bool) -> Part | None:
        """What a part on a disk counts for: what it was known to have, else all of it if that step was done once. In the store
        is what was put there."""
        if known is not None:
            return Part(moment=known.moment, names=held.names & known.names, num_bytes=held.num_bytes)
        lines = self._lines.get(held.step, frozenset())
        if of_store and self.stored is not None and self.stored.step == held.step:
            lines = frozenset({self.stored.line})
        certain = of_store or not self.was_redone(held.step) or lines == {FIRST_VALUES.line}
        if len(lines) != 1 or not certain:
            return None
        return Part(moment=Moment(step=held.step, line=min(lines)), names=held.names, num_bytes=held.num_bytes)
