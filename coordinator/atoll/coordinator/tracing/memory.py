"""How much memory a part of the graph needs on the peer that runs it, beyond what the peer's process had before.

A stage always holds its weights, their gradients, the optimizer's state and room to compute in; for each microbatch in flight
it holds what it received and sends, and what autograd saved. A stage that sends gradients back puts off those of its weights,
and keeps meanwhile the gradients of what its weights produced.

The room to compute in is the most that any moment takes beside that: a forward that passes a large value on, a backward with
the gradients on their way, or the gradient of one large parameter before it is added to the others.

What stays lies packed. What comes and goes with each microbatch shares a heap, and freed blocks leave gaps between those that
are in use: that share of the heap is lost. Very large blocks leave no gaps, for they come from the system, but they cannot use
what lies idle in the heap either (see ``allocator`` in the peer).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

from atoll.coordinator.planning.segments import StageMemory
from atoll.coordinator.tracing.cuts import crossing_values
from atoll.coordinator.tracing.dataflow import Dataflow
from atoll.coordinator.tracing.rehearsal import Rehearsal
from atoll.protocol.assignment import MOST_DEFERRED
from atoll.protocol.graph import BufferReference, InputReference, Node, ParameterReference, Reference

_CONVOLUTIONS = frozenset(f"aten.{name}.default" for name in ("conv1d", "conv2d", "conv3d", "convolution"))
HEAP_GAPS = 0.15
"""What lies idle in a heap between the blocks of microbatches in flight, relative to these; see benchmarks/memory.py."""
OWN_MAPPING_BYTES = 8 * 2**20
"""Blocks from this size on come from the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossing:
    """A value that node ``made`` makes and ``last`` is the last to use; ``memory`` is its memory's number."""

    made: int
    last: int
    num_bytes: int
    memory: int


class MemoryModel:
    """Memory needs of the ranges of one graph. There are ``copies`` of each trained weight: itself, and what is kept for it."""

    def __init__(self, rehearsal: Rehearsal, flow: Dataflow, copies: int) -> None:
        graph = rehearsal.graph
        self.nodes = graph.nodes
        self.costs = rehearsal.costs
        self._bindings = dict(graph.example)
        self._parameters = {spec.name: spec for spec in graph.parameters}
        self._buffers = {spec.name: spec for spec in graph.buffers}
        self.inputs = {name: spec.num_bytes(self._bindings) for name, spec in graph.inputs}
        self._state_copies = copies
        self._uses: dict[str, int] = {}
        for node in graph.nodes:
            for reference in node.references():
                if isinstance(reference, ParameterReference):
                    self._uses[reference.name] = self._uses.get(reference.name, 0) + 1
        self._crossing = [
            _Crossing(
                made=value.node,
                last=last,
                num_bytes=graph.spec(value).num_bytes(self._bindings),
                memory=rehearsal.memory_of[value],
            )
            for value, last in crossing_values(graph, flow)
        ]

    def need(self, first: int, end: int, *, recompute: bool) -> StageMemory:
        """The need of a stage with the nodes from ``first`` up to ``end``."""
        tally = _Tally(self)
        tally.add(first, end)
        received = [entry for entry in self._crossing if entry.made < first <= entry.last]
        sent = sum(entry.num_bytes for entry in self._crossing if first <= entry.made < end <= entry.last)
        return tally.need(received, sent, recompute)

    def between(self, positions: Sequence[int]) -> Callable[[int, int, bool], StageMemory]:
        """``memory(i, j, recompute)`` for stages from position number ``i`` to ``j``; all are worked out at the first call."""
        return _RangeMemory(self, tuple(positions))

    def parameter_bytes(self, name: str) -> tuple[int, int]:
        """(a parameter with the optimizer's state, a gradient of it); there is a gradient for each of its uses."""
        spec = self._parameters[name]
        return (self._state_copies * spec.num_bytes, spec.num_bytes) if spec.trainable else (spec.num_bytes, 0)

    def uses(self, name: str) -> int:
        """How often the whole graph uses a parameter."""
        return self._uses[name]

    def buffer_bytes(self, name: str) -> tuple[int, int]:
        """(what a buffer takes once, what it takes for each microbatch in flight): one that changes is copied for each."""
        spec = self._buffers[name]
        size = prod(spec.shape) * spec.dtype.itemsize
        return (2 * size, size) if spec.mutated else (size, 0)

    def is_deferred(self, node: Node) -> bool:
        """Whether the gradients of the node's weights are put off: those of matrices are, not those of vectors alone."""
        return any(len(self._parameters[name].shape) > 1 for name in self._trained(node))

    def scratch_bytes(self, node: Node) -> int:
        """What a kernel takes beside operands and results: convolutions write their weights down in another order."""
        if node.operator not in _CONVOLUTIONS:
            return 0
        names = [reference.name for reference in node.references() if isinstance(reference, ParameterReference)]
        return sum(self._parameters[name].num_bytes for name in names if prod(self._parameters[name].shape[2:]) > 1)

    def weight_gradient_bytes(self, node: Node) -> int:
        """The gradients of the node's own parameters, before they are added to those of other microbatches."""
        return sum(self._parameters[name].num_bytes for name in self._trained(node))

    def all_needs(self, positions: Sequence[int]) -> dict[tuple[int, int, bool], StageMemory]:
        """The need of every range between two of ``positions``, by their numbers. Each range grows from the one before."""
        needs = {}
        spanning = [entry for entry in self._crossing if _spans(entry, positions)]
        for start, first in enumerate(positions[:-1]):
            before = [entry for entry in spanning if entry.made < first <= entry.last]
            made_here = [entry for entry in spanning if entry.made >= first]
            tally = _Tally(self)
            for stop in range(start + 1, len(positions)):
                tally.add(positions[stop - 1], positions[stop])
                sent = sum(entry.num_bytes for entry in made_here if entry.made < positions[stop] <= entry.last)
                for recompute in (False, True):
                    needs[start, stop, recompute] = tally.need(before, sent, recompute)
        return needs

    def _trained(self, node: Node) -> set[str]:
        names = {reference.name for reference in node.references() if isinstance(reference, ParameterReference)}
        return {name for name in names if self._parameters[name].trainable}


class _Tally:
    """What a growing range of nodes holds, counted once each."""

    def __init__(self, model: MemoryModel) -> None:
        self._model = model
        self._saved: dict[int, int] = {}
        self._held: set[Reference] = set()
        self._activations = self._state = self._inputs = self._copies = self._deferred = 0
        self._from_others = 0
        """The gradients of parameters that other stages use too, which these send when the step's work is done."""
        self._in_heap = 0
        """Those of the activations that are small enough to come from the heap."""
        self._kept_for_later = 0
        """Those of the activations that are still held while the gradients of weights are put off."""
        self._forward = 0
        """The most that is alive in a microbatch's forward, what it saves included."""
        self._at_once = 0
        """The most that a backward takes that computes the weights' gradients at once."""
        self._towards_received = 0
        """The most that a backward takes that puts them off, less what it leaves to be put off in the end."""
        self._weight_gradient = 0

    def add(self, first: int, end: int) -> None:
        """The nodes from ``first`` up to ``end`` belong to the range as well."""
        for node, cost in zip(self._model.nodes[first:end], self._model.costs[first:end], strict=True):
            for number, size in cost.saved.items():
                more = size - self._saved.get(number, 0)
                self._saved[number] = size
                self._activations += more
                self._in_heap += more if size < OWN_MAPPING_BYTES else 0
            scratch = self._model.scratch_bytes(node)
            weights = self._model.weight_gradient_bytes(node)
            self._forward = max(self._forward, self._activations + cost.passing_bytes + scratch)
            self._at_once = max(self._at_once, cost.gradient_bytes + weights + scratch)
            # Backward comes from the end: by now what lies further on has left gradients for later, what comes before has not.
            self._towards_received = max(self._towards_received, cost.gradient_bytes + scratch - self._deferred)
            if self._model.is_deferred(node):
                self._deferred += cost.output_bytes
                self._kept_for_later = self._activations
                self._weight_gradient = max(self._weight_gradient, weights + scratch)
            self._hold_all(node.references())

    def need(self, received: Iterable[_Crossing], sent: int, recompute: bool) -> StageMemory:
        """The need of the range; ``received`` are the values that come from earlier stages."""
        entries = tuple(received)
        arriving = sum(entry.num_bytes for entry in entries)
        kept = sum(entry.num_bytes for entry in entries if recompute or entry.memory not in self._saved)
        gaps = 1.0 + HEAP_GAPS * self._heap_share
        # A message that waits to be used or to be acknowledged, in either direction.
        moving = self._working(bool(entries), recompute) + 2 * (arriving + sent)
        microbatch = kept + sent + self._inputs + self._copies + (0 if recompute else self._activations)
        return StageMemory(fixed_bytes=self._state + ceil(gaps * moving), microbatch_bytes=ceil(gaps * microbatch))

    @property
    def _heap_share(self) -> float:
        return self._in_heap / self._activations if self._activations else 1.0

    def _working(self, receives: bool, recompute: bool) -> int:
        """The most that any moment takes beside what is always held and what microbatches in flight hold."""
        anew = self._activations if recompute else 0
        forward = self._forward - (self._activations - anew)
        if not receives:
            return max(forward, self._at_once + anew, self._from_others)
        # One microbatch's weights' gradients are put off while the next goes forward or backward.
        later = self._deferred + self._kept_for_later - (self._activations - anew)
        backward = self._deferred + self._towards_received + anew
        accumulating = later + self._weight_gradient
        if self._weight_gradient >= OWN_MAPPING_BYTES:
            accumulating = max(accumulating, int(self._heap_share * backward) + self._weight_gradient)
        return max(MOST_DEFERRED * later + max(forward, backward, accumulating), self._from_others)

    def _hold_all(self, references: Iterable[Reference]) -> None:
        """Weights with gradients and optimizer state, buffers, batch inputs."""
        for reference in references:
            known = reference in self._held
            self._held.add(reference)
            if isinstance(reference, ParameterReference):
                self._hold_parameter(reference.name, known)
            elif isinstance(reference, BufferReference) and not known:
                once, copies = self._model.buffer_bytes(reference.name)
                self._state += once
                self._copies += copies
            elif isinstance(reference, InputReference) and not known:
                self._inputs += self._model.inputs[reference.name]

    def _hold_parameter(self, name: str, known: bool) -> None:
        """Its gradient for this use; the other things once."""
        lasting, gradient = self._model.parameter_bytes(name)
        self._state += gradient
        self._from_others -= gradient
        if not known:
            self._state += lasting
            self._from_others += gradient * self._model.uses(name)


class _RangeMemory:
    def __init__(self, model: MemoryModel, positions: tuple[int, ...]) -> None:
        self._model = model
        self._positions = positions
        self._needs: dict[tuple[int, int, bool], StageMemory] = {}

    def __call__(self, first: int, end: int, recompute: bool) -> StageMemory:
        if not self._needs:
            self._needs = self._model.all_needs(self._positions)
        return self._needs[first, end, recompute]


def _spans(entry: _Crossing, positions: Sequence[int]) -> bool:
    """Whether a value crosses a cut at one of ``positions``."""
    after = bisect_right(positions, entry.made)
    return after < len(positions) and positions[after] <= entry.last
