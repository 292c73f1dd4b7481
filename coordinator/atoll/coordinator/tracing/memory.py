"""How much memory a part of the graph needs on the peer that runs it.

A stage always holds its weights, their gradients, the optimizer's state and room to compute in; for each microbatch in flight
it holds what it received and sends, and what autograd saved. A stage that sends gradients back puts off those of its weights,
and keeps meanwhile the gradients of what its weights produced.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from atoll.coordinator.planning.segments import StageMemory
from atoll.coordinator.tracing.cuts import crossing_values
from atoll.coordinator.tracing.dataflow import Dataflow
from atoll.coordinator.tracing.rehearsal import Rehearsal
from atoll.protocol.assignment import MOST_DEFERRED
from atoll.protocol.graph import BufferReference, InputReference, Node, ParameterReference, Reference, ValueReference

_OPTIMIZER_COPIES = {"adamw": 2, "sgd": 0}
_WORKSPACE_COPIES = 3
"""Of the largest result of a node: the result, its gradient, and what the kernel uses meanwhile."""


class MemoryModel:
    """Memory needs of the ranges of one graph, for one optimizer."""

    def __init__(self, rehearsal: Rehearsal, flow: Dataflow, optimizer: str, momentum: float = 0.0) -> None:
        graph = rehearsal.graph
        self.nodes = graph.nodes
        self.costs = rehearsal.costs
        self._bindings = dict(graph.example)
        self._parameters = {spec.name: spec for spec in graph.parameters}
        self.buffers = {spec.name: _bytes(spec.shape) * spec.dtype.itemsize for spec in graph.buffers}
        self.inputs = {name: spec.num_bytes(self._bindings) for name, spec in graph.inputs}
        self._optimizer_copies = 1 if optimizer == "sgd" and momentum else _OPTIMIZER_COPIES[optimizer]
        self._uses: dict[str, int] = {}
        for node in graph.nodes:
            for reference in node.references():
                if isinstance(reference, ParameterReference):
                    self._uses[reference.name] = self._uses.get(reference.name, 0) + 1
        self._crossing = [
            (value.node, last, graph.spec(value).num_bytes(self._bindings)) for value, last in crossing_values(graph, flow)
        ]

    def need(self, first: int, end: int, *, recompute: bool) -> StageMemory:
        """The need of a stage with the nodes from ``first`` up to ``end``."""
        tally = _Tally(self)
        tally.add(first, end)
        return tally.need(*self._crossing_bytes(first, end), recompute)

    def between(self, positions: Sequence[int]) -> Callable[[int, int, bool], StageMemory]:
        """``memory(i, j, recompute)`` for stages from position number ``i`` to ``j``; all are worked out at the first call."""
        return _RangeMemory(self, tuple(positions))

    def parameter_bytes(self, name: str) -> int:
        """A parameter with a gradient for each of its uses and the optimizer's state."""
        spec = self._parameters[name]
        copies = 1 + self._uses[name] + self._optimizer_copies if spec.trainable else 1
        return copies * spec.num_bytes

    def is_deferred(self, node: Node) -> bool:
        """Whether the gradients of the node's weights are put off: those of matrices are, not those of vectors alone."""
        names = (reference.name for reference in node.references() if isinstance(reference, ParameterReference))
        return any(self._parameters[name].trainable and len(self._parameters[name].shape) > 1 for name in names)

    def all_needs(self, positions: Sequence[int]) -> dict[tuple[int, int, bool], StageMemory]:
        """The need of every range between two of ``positions``, by their numbers. Each range grows from the one before."""
        needs = {}
        spanning = [entry for entry in self._crossing if _spans(entry[0], entry[1], positions)]
        for start, first in enumerate(positions[:-1]):
            received = sum(size for made, last, size in spanning if made < first <= last)
            made_here = [entry for entry in spanning if entry[0] >= first]
            tally = _Tally(self)
            for stop in range(start + 1, len(positions)):
                tally.add(positions[stop - 1], positions[stop])
                sent = sum(size for made, last, size in made_here if made < positions[stop] <= last)
                for recompute in (False, True):
                    needs[start, stop, recompute] = tally.need(received, sent, recompute)
        return needs

    def _crossing_bytes(self, first: int, end: int) -> tuple[int, int]:
        """What a stage receives and sends for one microbatch."""
        received = sum(size for made, last, size in self._crossing if made < first <= last)
        sent = sum(size for made, last, size in self._crossing if first <= made < end <= last)
        return received, sent


class _Tally:
    """What a growing range of nodes holds, counted once each."""

    def __init__(self, model: MemoryModel) -> None:
        self._model = model
        self._saved: dict[int, int] = {}
        self._held: set[Reference] = set()
        self._activations = self._largest = self._state = self._inputs = self._deferred = 0

    def add(self, first: int, end: int) -> None:
        """The nodes from ``first`` up to ``end`` belong to the range as well."""
        for cost in self._model.costs[first:end]:
            for number, size in cost.saved.items():
                self._activations += size - self._saved.get(number, 0)
                self._saved[number] = size
            self._largest = max(self._largest, cost.output_bytes)
        for node, cost in zip(self._model.nodes[first:end], self._model.costs[first:end], strict=True):
            if self._model.is_deferred(node):
                self._deferred += cost.output_bytes
            for reference in node.references():
                if not isinstance(reference, ValueReference) and reference not in self._held:
                    self._held.add(reference)
                    self._hold(reference)

    def need(self, received: int, sent: int, recompute: bool) -> StageMemory:
        activations = self._activations
        moving = 2 * (received + sent) + self._inputs
        # A microbatch whose weights' gradients are put off, and the one whose backward comes next.
        deferred = (MOST_DEFERRED + 1) * self._deferred if received else 0
        recomputed = (MOST_DEFERRED + 1 if received else 1) * activations if recompute else 0
        workspace = _WORKSPACE_COPIES * self._largest + deferred + recomputed
        return StageMemory(fixed_bytes=self._state + workspace, microbatch_bytes=moving if recompute else moving + activations)

    def _hold(self, reference: Reference) -> None:
        """Weights with gradients and optimizer state, buffers with their working copy, batch inputs."""
        if isinstance(reference, ParameterReference):
            self._state += self._model.parameter_bytes(reference.name)
        elif isinstance(reference, BufferReference):
            self._state += 2 * self._model.buffers[reference.name]
        elif isinstance(reference, InputReference):
            self._inputs += self._model.inputs[reference.name]


class _RangeMemory:
    def __init__(self, model: MemoryModel, positions: tuple[int, ...]) -> None:
        self._model = model
        self._positions = positions
        self._needs: dict[tuple[int, int, bool], StageMemory] = {}

    def __call__(self, first: int, end: int, recompute: bool) -> StageMemory:
        if not self._needs:
            self._needs = self._model.all_needs(self._positions)
        return self._needs[first, end, recompute]


def _spans(made: int, last: int, positions: Sequence[int]) -> bool:
    """Whether a value that node ``made`` makes and node ``last`` is the last to use crosses a cut at one of ``positions``."""
    after = bisect_right(positions, made)
    return after < len(positions) and positions[after] <= last


def _bytes(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
