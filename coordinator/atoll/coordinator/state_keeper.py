"""Peers' state on its way through the coordinator: weights into a file at the end, first values out at the beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from atoll.coordinator import transfer
from atoll.coordinator.first_values import FirstValues, held_specs
from atoll.coordinator.offload import Offload
from atoll.coordinator.run.events import RunEvent, StateMoved, WorkFailed
from atoll.coordinator.weights import WeightsFile, WeightsLayout, state_specs
from atoll.protocol.errors import ResourceError, RunFailed
from atoll.protocol.graph import OpGraph, StageGraph
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Kind, MessageHeader, MessageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collection:
    """The file being written, and which names each stage's peer is to send."""

    generation: Generation
    file: WeightsFile
    expected: Mapping[PeerId, frozenset[str]]


class StateKeeper:
    """Serves StoreState and FetchState streams. Memory holds a few tensors, however large the model."""

    def __init__(self, offload: Offload, post: Callable[[RunEvent], None]) -> None:
        self._offload = offload
        self._post = post
        self._graph: OpGraph | None = None
        self._first_values: FirstValues | None = None
        self._stored: Callable[[str], Tensor | None] = lambda name: None
        self._to_fetch: dict[tuple[Generation, PeerId], frozenset[str]] = {}
        self._collection: _Collection | None = None

    def know(self, graph: OpGraph, first_values: FirstValues) -> None:
        """The model is traced."""
        self._graph = graph
        self._first_values = first_values

    def know_stored(self, stored: Callable[[str], Tensor | None]) -> None:
        """``stored`` gives a tensor that lies in a store and is lent from there, None for any other."""
        self._stored = stored

    def allow_fetching(self, generation: Generation, peers: Mapping[PeerId, tuple[str, ...]]) -> None:
        """Each peer may fetch these names, under this generation alone."""
        self._to_fetch = {(generation, peer): frozenset(names) for peer, names in peers.items()}

    async def open(self, path: Path, generation: Generation, step: StepNumber, holders: Mapping[PeerId, StageGraph]) -> None:
        """Begin a file of weights; the peers may send their state from now on."""
        assert self._graph is not None
        layout = WeightsLayout(state_specs(self._graph), {"step": str(step)})
        file = await self._offload.run(WeightsFile, path, layout)
        expected = {peer: frozenset(spec.name for spec in held_specs(graph)) for peer, graph in holders.items()}
        self._collection = _Collection(generation=generation, file=file, expected=expected)

    async def complete(self) -> Path:
        """Finish the file; raises RunFailed when it is not complete."""
        assert self._collection is not None
        collection, self._collection = self._collection, None
        await self._offload.run(collection.file.complete)
        return collection.file.path

    def abandon(self) -> None:
        """Drop a file that will not be completed."""
        if self._collection is not None:
            self._collection.file.abandon()
            self._collection = None

    async def receive(self, context: transfer.Context) -> None:
        """Serve one StoreState stream."""
        await transfer.receive_state(context, self._judge, self._store)

    async def send(
        self,
        context: transfer.Context,
        peer: PeerId,
        generation: Generation,
        names: tuple[str, ...],
        max_bytes_per_second: float,
    ) -> None:
        """Serve one FetchState stream, no faster than that (0: no limit)."""
        allowed = self._to_fetch.get((generation, peer), frozenset())
        foreign = [name for name in names if name not in allowed]
        if foreign or self._first_values is None:
            raise RunFailed(f"{peer} may not fetch {', '.join(foreign[:3]) or 'anything'} under generation {generation}")
        key = MessageKey(
            generation=generation,
            step=StepNumber(0),
            microbatch=MicrobatchIndex(0),
            kind=Kind.STATE,
            source=StageIndex(0),
            target=StageIndex(0),
        )
        await transfer.stream_state(
            context, key, self._noted(peer, names), self._value, max_bytes_per_second=max_bytes_per_second
        )

    def _value(self, name: str) -> Tensor:
        """From the store if it is lent from there, else the first value; on any thread."""
        assert self._first_values is not None
        stored = self._stored(name)
        return self._first_values.value(name) if stored is None else stored

    def _noted(self, peer: PeerId, names: tuple[str, ...]) -> Iterator[str]:
        """The names, each as its turn comes; the run hears that the transfer moves."""
        for name in names:
            self._post(StateMoved(peer=peer))
            yield name

    def _judge(self, peer: PeerId, header: MessageHeader) -> str | None:
        """Why a tensor that a peer wants to send is not taken; None when it is."""
        collection = self._collection
        if collection is None or header.key.generation != collection.generation or peer not in collection.expected:
            return f"no state of {peer} is expected under generation {header.key.generation}"
        if header.key.kind is not Kind.STATE or len(header.tensors) != 1:
            return "state travels as one tensor a message"
        tensor = header.tensors[0]
        if tensor.name not in collection.expected[peer]:
            return f"{tensor.name} is not part of the stage that {peer} holds"
        return collection.file.refusal(tensor.name, tensor.dtype, tensor.shape)

    async def _store(self, peer: PeerId, key: MessageKey, name: str, tensor: Tensor) -> None:
        collection = self._collection
        if collection is None or key.generation != collection.generation:
            raise RunFailed("the state is not wanted any more")
        try:
            await self._offload.run(collection.file.write, name, tensor)
        except ResourceError as error:
            self._post(WorkFailed(reason=str(error)))
            raise
        self._post(StateMoved(peer=peer))
