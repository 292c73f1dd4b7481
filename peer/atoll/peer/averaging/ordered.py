"""hivemind's all-reduce, made to give every member the same bits, and the same bits twice.

hivemind's runner adds parts in the order in which they arrive, keeps for itself what it has not encoded, sends each member
the difference to that member's values, and goes on with fewer when somebody fails. Averages are then equal to rounding,
which is enough for its own uses. Here

- parts are added in the group's order, when all are there (:mod:`atoll.peer.averaging.sums`);
- the owner of a share encodes each sum once, sends those bytes to all, and itself takes what they decode to;
- one that fails, fails the round: what follows is for the caller, who still has the values.

What comes in is taken in whether or not sums can be sent already, so that a slow download of one member delays no other.

hivemind's are still the cutting of values into parts, the dealing of parts by share, the streams between members and the
order of things in a round. This module imports hivemind, so import it where a round begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionInfo
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import aenumerate, amap_in_executor
from torch import Tensor

from atoll.peer.averaging.averager import Round
from atoll.peer.averaging.part_codec import PartCodec
from atoll.peer.averaging.shares import shares
from atoll.peer.averaging.sums import Sums
from atoll.protocol.errors import RoundFailed
from atoll.protocol.fault_points import FaultPoints

_PART_BYTES = 2**17
"""Of an encoded part. Small, so that sums go out while parts come in; each costs some 0.2 ms here and there."""
_PREFETCH = 4
_HEARSAY_SECONDS = 1.0
"""How long whoever sees a stream break waits to hear who failed: a member that gives up because of another breaks streams
too."""


class OrderedRunner(AllReduceRunner):  # type: ignore[misc]
    """One member's part in one round. ``servicer`` is the service that members' streams arrive at; ``num_received`` counts the
    parts and sums that came from others."""

    tensor_part_reducer: Any

    def __init__(
        self,
        *,
        p2p: P2P,
        servicer: type[ServicerBase],
        group: bytes,
        round: Round,
        identities: tuple[PeerID, ...],
        values: Tensor,
        chaos: FaultPoints,
    ) -> None:
        codec = PartCodec(round)

        def encode(index: int, total: Tensor) -> tuple[Any, Tensor]:
            chaos.reached("averaging", step=round.step)
            return codec.sum(total, self._firsts[round.own] + index)

        super().__init__(
            p2p=p2p,
            servicer_type=servicer,
            prefix=None,
            group_id=group,
            tensors=[values],
            weight=1.0,
            ordered_peer_ids=identities,
            peer_fractions=shares([member.bandwidth for member in round.members]),
            modes=[AveragingMode.NODE] * len(identities),
            compression=codec,
            part_size_bytes=_PART_BYTES,
            tensor_infos=[CompressionInfo.from_tensor(values, key=codec.key(round.own))],
            prefetch=_PREFETCH,
        )
        self.tensor_part_reducer.num_parts = 0  # it is replaced, and has nothing to complain about when it ends
        self.tensor_part_reducer.finalize()
        counts = self.tensor_part_container.num_parts_by_peer
        self._firsts = [sum(counts[:owner]) for owner in range(len(counts))]
        self.tensor_part_reducer = Sums(
            num_parts=counts[round.own],
            weights=[member.weight for member in round.members],
            divisor=round.divisor,
            encode=encode,
        )
        self._codec = codec
        self._round = round
        self._lengths = _lengths(values.numel(), part_size_bytes=_PART_BYTES, codec=codec)
        self._failed = asyncio.Event()
        self._doubts: set[asyncio.Task[None]] = set()
        self.failure: RoundFailed | None = None
        self.num_received = 0

    @property
    def sums(self) -> Sums:
        """Those that this member makes."""
        found: Sums = self.tensor_part_reducer
        return found

    def fail(self, suspect: int | None, reason: str) -> None:
        """Ends the round, if it goes on; the first call counts."""
        if self._future.done():
            return
        self.failure = self._round.failure(reason, () if suspect is None else (suspect,))
        self._failed.set()
        self.finalize(exception=AllreduceException(reason))

    def waited_for(self) -> tuple[int, ...]:
        """The members from whom something is missing: values for the sums made here, or else sums."""
        counts = self.tensor_part_container.num_parts_by_peer
        got = self.tensor_part_container._outputs_registered_by_peer
        return self.sums.missing_from() or tuple(owner for owner, count in enumerate(counts) if got[owner] < count)

    async def stop(self) -> None:
        """Ends what may still wait to accuse somebody."""
        for doubt in self._doubts:
            doubt.cancel()
        await asyncio.gather(*self._doubts, return_exceptions=True)
        if self._future.done() and not self._future.cancelled():
            self._future.exception()  # it is known: nobody need complain that it was never looked at

    def should_delay_results(self, peer_id: PeerID) -> bool:
        """Never: what comes in does not wait for what goes out."""
        return False

    async def _handle_missing_senders(self) -> None:
        """The round's deadline says whom it waits for."""

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        owner = self.ordered_peer_ids.index(peer_id)
        try:
            await (self._bring_own() if owner == self._round.own else self._exchange_with(owner))
        except Exception as error:
            self._doubt(owner, f"{type(error).__name__}: {error}")

    async def _bring_own(self) -> None:
        """The share that is summed here: own values in, sums out."""
        loop, own = asyncio.get_running_loop(), self._round.own
        for index, part in enumerate(self.parts_for_local_averaging):
            self.sums.add(
                own, index, await loop.run_in_executor(None, self._codec.round_trip, part, own, self._firsts[own] + index)
            )
        for index in range(self.sums.num_parts):
            _, decoded = await self.sums.result(index)
            self.tensor_part_container.register_processed_part(own, index, decoded)

    async def _exchange_with(self, owner: int) -> None:
        """A share that another member sums: values out, sums in."""

        def decoded(item: tuple[int, Any]) -> tuple[int, Tensor]:
            index, message = item
            if message.code != averaging_pb2.AVERAGED_PART:
                raise AllreduceException(f"it answered {averaging_pb2.MessageCode.Name(message.code)}")
            place = self._firsts[owner] + index
            return index, self._codec.decode_sum(message.tensor_part, place, self._lengths[place])

        stub = self._get_peer_stub(self.ordered_peer_ids[owner])
        stream = await stub.rpc_aggregate_part(self._generate_input_for_peer(owner))
        count = 0
        async for index, values in amap_in_executor(decoded, aenumerate(stream), max_prefetch=_PREFETCH):
            self.tensor_part_container.register_processed_part(owner, index, values)
            self.num_received += 1
            count = index + 1
        wanted = self.tensor_part_container.num_parts_by_peer[owner]
        if count != wanted:
            raise AllreduceException(f"its stream ended after {count} of {wanted} sums")

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[Any], context: P2PContext
    ) -> AsyncGenerator[averaging_pb2.AveragingData, None]:
        """What another member sends for the share that is summed here, and the sums."""
        sender = self.ordered_peer_ids.index(context.remote_id)
        taking = asyncio.create_task(self._take_in(sender, stream))
        sent = 0
        try:
            while sent < self.sums.num_parts:
                encoded, _ = await self.sums.result(sent)
                sent += 1
                yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=encoded)
            # hivemind closes the stream when this ends. If the member's end of its own was not read by then, the daemon meets a
            # closed socket with it, resets the stream, and sums that are still on their way to the member are lost.
            await asyncio.wait([taking], timeout=self._round.deadline_seconds)
        except RoundFailed:
            return  # the round has failed; whose fault it was is told otherwise
        finally:
            taking.cancel()
            if sent < self.sums.num_parts:
                self._doubt(sender, "its stream broke before it had all sums")

    async def _take_in(self, sender: int, stream: AsyncIterator[Any]) -> None:
        first, count = self._firsts[self._round.own], self.sums.num_parts

        def decoded(item: tuple[int, Any]) -> tuple[int, Tensor]:
            index, message = item
            if index >= count:
                raise AllreduceException(f"it sent more than the {count} parts that are summed here")
            return index, self._codec.decode(message.tensor_part, sender, first + index, self._lengths[first + index])

        received = 0
        try:
            async for index, values in amap_in_executor(decoded, aenumerate(stream), max_prefetch=_PREFETCH):
                self.sums.add(sender, index, values)
                self.num_received += 1
                received = index + 1
            if received < count:
                self._doubt(sender, f"it sent {received} of {count} parts")
        except Exception as error:
            self._doubt(sender, f"{type(error).__name__}: {error}")

    def _doubt(self, member: int, reason: str) -> None:
        """Fails the round for what ``member`` seems to have done, unless somebody says in time that it was another."""
        if not self._future.done():
            doubt = asyncio.get_running_loop().create_task(self._accuse_later(member, reason))
            self._doubts.add(doubt)
            doubt.add_done_callback(self._doubts.discard)

    async def _accuse_later(self, member: int, reason: str) -> None:
        try:
            await asyncio.wait_for(self._failed.wait(), _HEARSAY_SECONDS)
        except TimeoutError:
            self.fail(member, reason)


def _lengths(total: int, *, part_size_bytes: int, codec: PartCodec) -> list[int]:
    """Of all parts, as hivemind cuts them."""
    size = int(part_size_bytes / (4 * codec.ratio))
    return [min(size, total - first) for first in range(0, total, size)]
