"""Averaging among replicas with hivemind: rounds over the connections of one :class:`~atoll.protocol.hive.Hive`.

The group is the one that the plan names: there is no matchmaking and no DHT in it. Members connect by the addresses that
they told each other over the links of the plan, and are who these say, for an address ends in the identity that libp2p's
handshake shows. :meth:`HivemindAverager.expect` says who may send anything; all others are refused.

A member that gives up tells the others because of whom, so that all accuse the same one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.peer.averaging.averager import Round, flat, unflat
from atoll.protocol.errors import RoundFailed
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.hive import Hive, HivePlace, import_hivemind

if TYPE_CHECKING:
    from atoll.peer.averaging.ordered import OrderedRunner
    from atoll.peer.averaging.reception import Reception

_logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
"""Whether anything came is looked at this often."""
_LAST_SECONDS = 5.0
"""How long closing waits for others to have what they are being sent."""


class HivemindAverager:
    """An :class:`~atoll.peer.averaging.averager.Averager`. Made by :meth:`start`."""

    def __init__(self, hive: Hive, reception: Reception) -> None:
        self.hive = hive
        self._reception = reception

    @classmethod
    async def start(cls, place: HivePlace, chaos: FaultPoints | None = None) -> HivemindAverager:
        """Raises ResourceError where hivemind is missing, or does not start."""
        hive = await Hive.start(place)
        await asyncio.to_thread(import_hivemind, "atoll.peer.averaging.reception")
        from atoll.peer.averaging.reception import Reception

        reception = Reception(chaos or FaultPoints())
        try:
            await reception.add_p2p_handlers(hive.p2p)
        except BaseException:
            await hive.close()
            raise
        return cls(hive, reception)

    @property
    def address(self) -> str:
        """Of this process's hive."""
        return self.hive.address

    def expect(self, addresses: Iterable[str]) -> None:
        """From now on those at these addresses may send what belongs to rounds, and nobody else."""
        self._reception.expect(addresses)

    async def average(self, round: Round, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See :meth:`~atoll.peer.averaging.averager.Averager.average`."""
        values = await asyncio.to_thread(flat, tensors)
        if not values.numel():
            return unflat(values, tensors)
        runner: OrderedRunner | None = None
        try:
            await self._connect(round)
            runner = self._reception.runner(self.hive.p2p, round, values)
            return unflat(torch.cat(await self._while_it_moves(runner, round.deadline_seconds)), tensors)
        except TimeoutError:
            suspects = runner.waited_for() if runner is not None else ()
            names = ", ".join(round.members[suspect].peer for suspect in suspects)
            failure = round.failure(f"nothing more came from {names or 'anybody'} in {round.deadline_seconds:g} s", suspects)
        except RoundFailed as error:
            failure = error
        finally:
            if runner is not None:
                await runner.stop()
        _logger.info("%s", failure)
        await self._reception.give_up(self.hive.p2p, round, failure)
        raise failure

    async def _while_it_moves(self, runner: OrderedRunner, deadline_seconds: float) -> list[Tensor]:
        """What comes of the round; raises TimeoutError when nothing came for so long."""
        loop = asyncio.get_running_loop()
        running = loop.create_task(self._reception.run(runner))
        seen, since = runner.num_received, loop.time()
        try:
            while not (await asyncio.wait([running], timeout=min(_LOOK_SECONDS, deadline_seconds)))[0]:
                if runner.num_received != seen:
                    seen, since = runner.num_received, loop.time()
                elif loop.time() - since >= deadline_seconds:
                    raise TimeoutError
            return running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def close(self) -> None:
        """See :meth:`~atoll.peer.averaging.averager.Averager.close`."""
        await self._reception.close(_LAST_SECONDS)
        await self.hive.close()

    async def _connect(self, round: Round) -> None:
        """Raises RoundFailed for a member that cannot be reached."""
        if not self.hive.is_running:
            raise round.failure("hivemind's daemon has ended here", (round.own,))
        seconds = round.deadline_seconds / 2

        async def connect(member: int) -> None:
            address = round.members[member].address
            try:
                await self.hive.connect(address, seconds, first=round.own < member)
            except TimeoutError:
                raise round.failure(f"it could not be reached at {address} in {seconds:g} s", (member,)) from None

        tasks = [asyncio.create_task(connect(member)) for member in range(len(round.members)) if member != round.own]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
