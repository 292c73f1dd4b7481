"""The replicas of one stage under one plan, who sum their gradients: over their own links, or over hivemind's connections.

With hivemind each says over the links, while the plan is loaded, where its hive is; so who may take part is known by the
certificates of the run. If one has none (no wheel for its platform, or its daemon does not start), all use the links.

In a round the links serve to agree: all begin when the last one has its gradients, and say afterwards whether they have the
sum. Where one has not, though nobody is lost, all do the round again, and after two tries over the links; so all replicas
have the sum of the same round, and a fault of hivemind's costs no step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from torch import Tensor

from atoll.peer.averaging.averager import Averager, Member, Round
from atoll.peer.averaging.hivemind_averager import HivemindAverager
from atoll.peer.averaging.low_rank import LowRankAverager
from atoll.peer.averaging.over_links import LinksAverager
from atoll.protocol.assignment import Assignment
from atoll.protocol.averaging import Transport
from atoll.protocol.errors import LinkError, RoundFailed
from atoll.protocol.ids import Generation

MOST_ATTEMPTS = 2
"""At a round with hivemind, before it is done over the links."""
MOST_FAILED = 4
"""Attempts that fail under a plan before hivemind is left alone."""
_YES, _NO = b"1", b"0"
_logger = logging.getLogger("atoll.peer")


class ReplicaGroup:
    """Made for an assignment; ``links`` sums over the links of its plan, ``hive`` starts hivemind or says None where there is
    none. Belongs to the event loop."""

    def __init__(
        self, assignment: Assignment, links: LinksAverager, hive: Callable[[], Awaitable[HivemindAverager | None]]
    ) -> None:
        self.links = links
        self._assignment = assignment
        self._hive = hive
        self._averager: Averager = links
        rank = assignment.averaging.rank
        self._low_rank = None if rank is None else LowRankAverager(links, rank=rank, seed=assignment.run_seed)
        self._summing: set[asyncio.Task[list[Tensor]]] = set()

    async def meet(self) -> None:
        """Finds out with the others how they sum. Raises LinkError."""
        settings = self._assignment.averaging
        if len(self._assignment.group.replicas) == 1 or settings.transport is not Transport.HIVEMIND:
            return
        hive = await self._hive()
        own = _YES + (b"" if hive is None else hive.address.encode())
        try:
            words = await self.links.agree(self._round(self._assignment.generation, self._assignment.committed_step), own)
            addresses = [word[1:].decode() for word in words]
        except (RoundFailed, UnicodeDecodeError) as error:
            raise _accusing(error, self._assignment) from error
        without = [peer for peer, address in zip(self._assignment.group.replicas, addresses, strict=True) if not address]
        if hive is None or without:
            _logger.warning("gradients are summed over the peers' own links: %s cannot use hivemind", ", ".join(without))
            return
        hive.expect(addresses)
        self._averager = OverHivemind(self.links, hive, tuple(addresses), settings.codec)
        if self._low_rank is not None:
            self._low_rank = LowRankAverager(self._averager, rank=settings.rank or 1, seed=self._assignment.run_seed)

    async def sum_up(self, generation: Generation, step: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of all replicas, summed. Raises RoundFailed, and Implausible for what no honest replica sends."""
        task = asyncio.get_running_loop().create_task(self._sum(self._round(generation, step), gradients))
        self._summing.add(task)
        task.add_done_callback(self._summing.discard)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            raise RoundFailed("the plan for which gradients were summed is over")
        return task.result()

    def committed(self) -> None:
        """The step whose gradients were summed has happened."""
        self.links.committed()
        if self._low_rank is not None:
            self._low_rank.commit()

    def advance(self, generation: Generation) -> None:
        """What is of older generations is over."""
        for task in self._summing:
            task.cancel()
        self.links.advance(generation)

    async def close(self) -> None:
        """Nobody is waited for any more."""
        for task in self._summing:
            task.cancel()
        await self.links.close()

    async def _sum(self, round: Round, gradients: Sequence[Tensor]) -> list[Tensor]:
        if self._low_rank is None:
            return await self._averager.average(round, gradients)
        summed = await self._low_rank.average(round, {str(place): gradient for place, gradient in enumerate(gradients)})
        return list(summed.values())

    def _round(self, generation: Generation, step: int) -> Round:
        assignment = self._assignment
        bandwidths = assignment.averaging.bandwidths or (None,) * len(assignment.group.replicas)
        return Round(
            key=f"{generation}.{step}",
            members=tuple(
                Member(peer=peer, bandwidth=bandwidth)
                for peer, bandwidth in zip(assignment.group.replicas, bandwidths, strict=True)
            ),
            own=assignment.replica,
            deadline_seconds=assignment.link_seconds,
            seed=assignment.run_seed,
            step=step,
        )


class OverHivemind:
    """Rounds of hivemind's that the members agree on over their ``links``; an
    :class:`~atoll.peer.averaging.averager.Averager`. ``addresses`` are the members' hives, in the group's order."""

    def __init__(self, links: LinksAverager, hive: HivemindAverager, addresses: tuple[str, ...], codec: str) -> None:
        self._links = links
        self._hive = hive
        self._addresses = addresses
        self._codec = codec
        self._num_failed = 0

    @property
    def address(self) -> str:
        """Of this process's hive."""
        return self._hive.address

    async def average(self, round: Round, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See :meth:`~atoll.peer.averaging.averager.Averager.average`; raises RoundFailed where a member is lost."""
        members = zip(round.members, self._addresses, strict=True)
        round = replace(
            round, members=tuple(replace(member, address=address) for member, address in members), codec=self._codec
        )
        for attempt in range(MOST_ATTEMPTS):
            if self._num_failed >= MOST_FAILED:  # counted alike by all, for all hear how each attempt ended
                break
            await self._links.agree(round, _YES)
            found = await self._attempt(replace(round, key=f"{round.key}/{attempt}"), tensors)
            answers = await self._links.agree(round, _NO if found is None else _YES)
            if found is not None and all(answer == _YES for answer in answers):
                return found
            self._num_failed += 1
            without = [member.peer for member, answer in zip(round.members, answers, strict=True) if answer != _YES]
            _logger.warning("averaging of step %d did not reach %s: it is done again", round.step, ", ".join(without))
        return await self._links.average(round, tensors)

    async def close(self) -> None:
        """The hive outlives a plan."""

    async def _attempt(self, round: Round, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        try:
            return await self._hive.average(round, tensors)
        except RoundFailed:  # it is in the log
            return None


def _accusing(error: RoundFailed | UnicodeDecodeError, assignment: Assignment) -> LinkError:
    suspects = error.suspects if isinstance(error, RoundFailed) else ()
    return LinkError(suspects[0] if suspects else assignment.peer, f"replicas could not agree how to sum gradients: {error}")
