"""Makes batches and sends each stage the inputs that it uses, in the background and in the order asked for.

At most one batch is being made and sent; how far it runs ahead of a peer is bounded by the peer's session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor

from atoll.compression.registry import encode_message
from atoll.coordinator.data.feed import Feed, Microbatch
from atoll.coordinator.learning_rates import InnerRates
from atoll.coordinator.offload import Offload
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.run.events import BatchPrepared
from atoll.coordinator.run.instructions import SendBatches
from atoll.coordinator.sessions.sessions import Sessions
from atoll.protocol.assignment import LEARNING_RATE
from atoll.protocol.errors import RunFailed
from atoll.protocol.graph import OpGraph, StageGraph, bind
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, PeerId, StageIndex
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageKey
from atoll.protocol.samples import sample_numbers

COORDINATOR_STAGE = StageIndex(0)
"""What a batch has as its source; a stage's number only matters between stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A stage, and those of whom one gets the inputs of each microbatch."""

    group: Group
    inputs: tuple[str, ...]


def routes(graphs: Sequence[StageGraph], plan: Plan) -> tuple[Route, ...]:
    """Where the inputs go under a plan. Every stage gets a message for every microbatch: it tells the sizes too."""
    return tuple(
        Route(group=stage.group, inputs=tuple(name for name, _ in graph.inputs))
        for graph, stage in zip(graphs, plan.stages, strict=True)
    )


class BatchSender:
    """``post`` hears of each batch before its first microbatch is sent; ``rates`` are of local steps, where there are any."""

    def __init__(
        self,
        feed: Feed,
        graph: OpGraph,
        sessions: Sessions,
        offload: Offload,
        post: Callable[[BatchPrepared], None],
        rates: InnerRates | None = None,
    ) -> None:
        self._feed = feed
        self._graph = graph
        self._sessions = sessions
        self._offload = offload
        self._post = post
        self._rates = rates
        self._requests: asyncio.Queue[SendBatches] = asyncio.Queue()
        self._generation = Generation(0)
        self._routes: tuple[Route, ...] = ()
        self._evaluation_weights: tuple[float, ...] | None = None

    def under(self, generation: Generation, routes: tuple[Route, ...] | None = None) -> None:
        """From now on only this generation's requests matter; ``routes`` are given when the plan is a new one."""
        self._generation = generation
        if routes is not None:
            self._routes = routes

    def request(self, request: SendBatches) -> None:
        self._requests.put_nowait(request)

    async def run(self) -> None:
        """Serve requests until cancelled. Raises AtollError when the data cannot be read or does not suit the model."""
        while True:
            request = await self._requests.get()
            if request.generation == self._generation:
                await (self._send_evaluation(request) if request.evaluation else self._send_step(request))

    async def _send_step(self, request: SendBatches) -> None:
        batch = await self._offload.run(self._feed.batch, request.step)
        self._post(
            BatchPrepared(
                step=request.step,
                evaluation=False,
                weights=tuple(float(microbatch.weight) for microbatch in batch.microbatches),
                num_tokens=batch.num_tokens,
                samples=batch.samples_hash,
                sample_ids=tuple(microbatch.sample_ids for microbatch in batch.microbatches),
            )
        )
        for microbatch in batch.microbatches:
            await self._send(request, microbatch, batch.total_weight)

    async def _send_evaluation(self, request: SendBatches) -> None:
        """The samples are too many to hold, so the weights are found in a first pass; they never change."""
        microbatches = self._feed.validation()
        if self._evaluation_weights is None:
            self._evaluation_weights = await self._offload.run(_weights, microbatches)
        weights = self._evaluation_weights
        self._post(
            BatchPrepared(
                step=request.step,
                evaluation=True,
                weights=weights,
                num_tokens=int(sum(weights)),
                samples=blake2b(b"validation", digest_size=8).hexdigest(),
                sample_ids=(),
            )
        )
        for index in range(len(microbatches)):
            microbatch = await self._offload.run(microbatches.__getitem__, index)
            await self._send(request, microbatch, sum(weights))

    async def _send(self, request: SendBatches, microbatch: Microbatch, total_weight: float) -> None:
        numbers = {"scale": microbatch.weight / total_weight}
        if self._rates is not None and not request.evaluation:
            numbers[LEARNING_RATE] = self._rates.of(request.step, microbatch.index)
        encoded = await self._offload.run(encode, self._graph, request, microbatch, numbers, self._routes)
        for peer, message in encoded:
            session = self._sessions.find(peer)
            if session is not None and request.generation == self._generation:
                await session.send(message)


def encode(
    graph: OpGraph, request: SendBatches, microbatch: Microbatch, about: Mapping[str, float], routes: tuple[Route, ...]
) -> list[tuple[PeerId, EncodedMessage]]:
    """The messages of one microbatch, one for each stage, with numbers ``about`` it and its sizes. Raises RunFailed when the
    data does not suit the model."""
    numbers = dict(about)
    for symbol, size in _sizes(graph, microbatch.inputs).items():
        numbers[f"size:{symbol}"] = float(size)
    if not request.evaluation:
        numbers |= sample_numbers(microbatch.sample_ids)
    encoded = []
    for route in routes:
        key = MessageKey(
            generation=request.generation,
            step=request.step,
            microbatch=microbatch.index,
            kind=Kind.BATCH,
            source=COORDINATOR_STAGE,
            target=route.group.stage,
            evaluation=request.evaluation,
        )
        tensors = tuple((name, microbatch.inputs[name].contiguous()) for name in route.inputs)
        encoded.append(
            (
                route.group.holder_of(microbatch.index),
                encode_message(Message(key=key, tensors=tensors, numbers=numbers), "packed"),
            )
        )
    return encoded


def _sizes(graph: OpGraph, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    try:
        return bind(graph.inputs, {name: tuple(tensor.shape) for name, tensor in inputs.items()})
    except ValueError as error:
        raise RunFailed(f"the data does not suit the traced model: {error}") from error


def _weights(microbatches: Sequence[Microbatch]) -> tuple[float, ...]:
    return tuple(float(microbatch.weight) for microbatch in microbatches)
