"""What arrives from other members, for all rounds of this process: each stream goes to its round, once that has begun here. Who
is not expected is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import AsyncIterator  # noqa: UP035 - hivemind reads the annotations of rpc methods, and knows these

from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import achain, as_aiter
from torch import Tensor

from atoll.peer.averaging.averager import Round
from atoll.peer.averaging.ordered import OrderedRunner
from atoll.protocol.errors import RoundFailed
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.hive import identity_of

_BEGIN_SECONDS = 300.0
"""How long a member that is ahead may wait for this one; it has a deadline of its own."""
_MAX_EARLY = 64
"""Streams that wait for their round, and failures of rounds that have not begun: nobody is ahead of us by so many."""
_TELL_SECONDS = 1.0


class Reception(ServicerBase):  # type: ignore[misc]
    """Belongs to one event loop."""

    def __init__(self, chaos: FaultPoints) -> None:
        self._chaos = chaos
        self._expected: frozenset[PeerID] = frozenset()
        self._runners: dict[bytes, OrderedRunner] = {}
        self._given_up: OrderedDict[bytes, tuple[PeerID, bytes]] = OrderedDict()
        self._changed = asyncio.Condition()
        self._num_early = 0
        self._num_served = 0

    def expect(self, addresses: Iterable[str]) -> None:
        """From now on those at these addresses may send something."""
        self._expected = frozenset(PeerID.from_base58(identity_of(address)) for address in addresses)

    def runner(self, p2p: P2P, round: Round, values: Tensor) -> OrderedRunner:
        """This member's part in ``round``, not begun yet."""
        return OrderedRunner(
            p2p=p2p,
            servicer=Reception,
            group=_group(round),
            round=round,
            identities=_identities(round),
            values=values,
            chaos=self._chaos,
        )

    async def run(self, runner: OrderedRunner) -> list[Tensor]:
        """The values' average, in pieces; raises RoundFailed."""
        await self._begin(runner)
        try:
            return [piece async for piece in runner]
        except AllreduceException as error:
            raise runner.failure or RoundFailed(str(error)) from None
        finally:
            async with self._changed:
                del self._runners[runner.group_id]

    async def give_up(self, p2p: P2P, round: Round, failure: RoundFailed) -> None:
        """Tells the other members, who would see streams break and accuse this one."""
        culprit = next((index for index, member in enumerate(round.members) if member.peer in failure.suspects), round.own)
        identities = _identities(round)
        message = averaging_pb2.AveragingData(
            code=averaging_pb2.CANCELLED, group_id=_group(round), peer_id=identities[culprit].to_bytes()
        )
        told = [identity for index, identity in enumerate(identities) if index not in (culprit, round.own)]
        calls = [Reception.get_stub(p2p, identity).rpc_give_up(message, timeout=_TELL_SECONDS) for identity in told]
        await asyncio.gather(*calls, return_exceptions=True)

    async def close(self, within_seconds: float) -> None:
        """Waits until the others have what they are being sent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_seconds), self._changed:
                await self._changed.wait_for(lambda: not self._num_served)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """A member sends its values of the share that is summed here, and receives the sums."""
        if context.remote_id not in self._expected:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        first = await asyncio.wait_for(anext(stream), _BEGIN_SECONDS)
        runner = await self._begun(first.group_id)
        if runner is None or context.remote_id not in runner.ordered_peer_ids:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        self._num_served += 1
        try:
            async with contextlib.aclosing(runner.rpc_aggregate_part(achain(as_aiter(first), stream), context)) as sums:
                async for message in sums:
                    yield message
        finally:
            self._num_served -= 1
            async with self._changed:
                self._changed.notify_all()

    async def rpc_give_up(self, request: averaging_pb2.AveragingData, context: P2PContext) -> averaging_pb2.AveragingData:
        """A member will not go on with a round, because of the one whose identity it says."""
        runner = self._runners.get(request.group_id)
        if context.remote_id not in self._expected:
            return averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
        if runner is not None:
            _told(runner, context.remote_id, request.peer_id)
        else:
            self._given_up[request.group_id] = (context.remote_id, request.peer_id)
            while len(self._given_up) > _MAX_EARLY:
                self._given_up.popitem(last=False)
        return averaging_pb2.AveragingData(code=averaging_pb2.ACCEPTED)

    async def _begin(self, runner: OrderedRunner) -> None:
        async with self._changed:
            self._runners[runner.group_id] = runner
            self._changed.notify_all()
        told = self._given_up.pop(runner.group_id, None)
        if told is not None:
            _told(runner, *told)

    async def _begun(self, group: bytes) -> OrderedRunner | None:
        """The round, when it has begun; None for what is none, or is too early by far."""
        if self._num_early >= _MAX_EARLY:
            return None
        self._num_early += 1
        try:
            async with asyncio.timeout(_BEGIN_SECONDS), self._changed:
                await self._changed.wait_for(lambda: group in self._runners)
                return self._runners[group]
        except TimeoutError:
            return None
        finally:
            self._num_early -= 1


def _told(runner: OrderedRunner, teller: PeerID, culprit: bytes) -> None:
    """What a member says is believed; what a stranger says is not."""
    identities = list(runner.ordered_peer_ids)
    accused = PeerID(culprit)
    if teller in identities and accused in identities:
        runner.fail(identities.index(accused), "another member gave up because of it")


def _identities(round: Round) -> tuple[PeerID, ...]:
    return tuple(PeerID.from_base58(identity_of(member.address)) for member in round.members)


def _group(round: Round) -> bytes:
    """Members that do not agree on what they do are in different groups, and so do nothing together."""
    agreed = [round.key, round.codec, round.divisor, round.seed, round.step]
    agreed += [(member.peer, member.address, member.weight, member.bandwidth) for member in round.members]
    return hashlib.blake2b(repr(agreed).encode(), digest_size=20).digest()
