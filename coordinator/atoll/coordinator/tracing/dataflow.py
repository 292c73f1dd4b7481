"""Which values of a graph may cross a cut, and which are better computed again on the far side.

A value is *recomputable* when it follows from batch inputs and constant buffers alone, without random numbers or heavy work:
masks, positions, rotary tables. All other values that are used beyond a cut are sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from atoll.coordinator.tracing.effects import AliasClasses, is_heavy, is_random, written_references
from atoll.protocol.graph import (
    BufferReference,
    Node,
    OpGraph,
    ParameterReference,
    Reference,
    ValueReference,
    references_in,
)
from atoll.protocol.ids import NodeIndex


def all_references(node: Node) -> Iterator[Reference]:
    """The references of ``node`` in training and in evaluation mode."""
    yield from node.references()
    yield from references_in(node.evaluation or ())


class Dataflow:
    """What a graph's nodes depend on, beyond the references that they show: memory shared and written."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.aliases = AliasClasses(graph.nodes)
        mutated = {buffer.name for buffer in graph.buffers if buffer.mutated}
        self._fixed_roots = {self.aliases.root(BufferReference(name)) for name in mutated}
        self._sent_roots = self._find_sent_roots()

    def recomputable(self, value: ValueReference) -> bool:
        """Whether ``value`` can be computed anew wherever it is needed."""
        return self.aliases.root(value) not in self._sent_roots

    def recomputation(self, value: ValueReference, reader: NodeIndex) -> Iterator[Node]:
        """The nodes that must run, besides those they depend on, so that ``reader`` finds ``value`` as it is meant."""
        yield self.graph.nodes[value.node]
        for writer in self.aliases.writers.get(self.aliases.root(value), ()):
            if value.node != writer.index < reader:
                yield writer

    def forbidden_ranges(self) -> Iterator[tuple[NodeIndex, NodeIndex, str]]:
        """(first, last, reason): no cut may lie after node ``first`` and at or before node ``last``."""
        for root, users in self._users().items():
            if root in self._fixed_roots:
                yield users[0], users[-1], "a buffer that the forward modifies must stay on one stage"
            elif root in self._sent_roots and (writers := self.aliases.writers.get(root)):
                yield self._first_maker(root), writers[-1].index, "a tensor that crosses must not be modified on the far side"
        yield from self._mode_dependent_ranges()

    def _mode_dependent_ranges(self) -> Iterator[tuple[NodeIndex, NodeIndex, str]]:
        """A value that exists, or is used, in one mode alone must not cross."""
        reason = "a value that only training or only evaluation uses must not cross"
        for node in self.graph.nodes:
            training = set(node.references())
            for reference in all_references(node):
                if not isinstance(reference, ValueReference) or self.recomputable(reference):
                    continue
                if reference not in training or self.graph.nodes[reference.node].training_only:
                    yield reference.node, node.index, reason

    def _users(self) -> dict[Reference, list[NodeIndex]]:
        """For each piece of memory, by its root, the nodes that refer to it, in order."""
        users: dict[Reference, list[NodeIndex]] = defaultdict(list)
        for node in self.graph.nodes:
            for root in {self.aliases.root(reference) for reference in all_references(node)}:
                users[root].append(node.index)
        return users

    def _first_maker(self, root: Reference) -> NodeIndex:
        return min(member.node for member in self.aliases.members[root] if isinstance(member, ValueReference))

    def _find_sent_roots(self) -> set[Reference]:
        """Memory whose content depends on parameters, mutated buffers or random numbers, or takes much work."""
        sent = set(self._fixed_roots)
        size = -1
        while size != len(sent):
            size = len(sent)
            for node in self.graph.nodes:
                if self._depends(node, sent):
                    sent.update(self.aliases.root(ValueReference(node.index, number)) for number in range(len(node.outputs)))
                    sent.update(self.aliases.root(reference) for reference in written_references(node))
        return sent

    def _depends(self, node: Node, sent: set[Reference]) -> bool:
        return (
            is_random(node)
            or is_heavy(node, self.graph.spec)
            or any(
                isinstance(reference, ParameterReference) or self.aliases.root(reference) in sent
                for reference in all_references(node)
            )
        )
