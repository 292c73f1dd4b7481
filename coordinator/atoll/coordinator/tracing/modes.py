"""Lines up the trace in training mode with the trace in evaluation mode.

The result is the training trace, where each node knows its arguments in evaluation mode and whether it exists there at all. The
two traces need not differ by known rules alone (dropout off, batch norm on its running statistics): whatever the model does in
evaluation mode is accepted as long as its operators are, in order, some of those of training mode.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from atoll.coordinator.tracing.conversion import Converted
from atoll.coordinator.tracing.pruning import prune, with_references
from atoll.protocol.errors import TraceError
from atoll.protocol.graph import BufferReference, Node, Reference, ValueReference
from atoll.protocol.ids import NodeIndex

_MATCH_WINDOW = 256
"""How far ahead a node with the very same operands is looked for before the nearest with the same operator is taken."""


def merge_modes(training: Converted, evaluation: Converted) -> Converted:
    """The nodes of ``training`` with what ``evaluation`` says about evaluation mode; raises TraceError when they do not fit."""
    evaluation = prune(evaluation)
    training = prune(training)
    matching = _Matching(training, evaluation)
    for node in evaluation.nodes:
        matching.place(node)
    if matching.translated(evaluation.loss) != training.loss:
        raise TraceError("the model computes another loss in evaluation mode than in training mode; compute the same in both")
    return dataclasses.replace(training, nodes=matching.merged())


class _Matching:
    def __init__(self, training: Converted, evaluation: Converted) -> None:
        self._nodes = training.nodes
        self._constants = _constant_names(training, evaluation)
        self._partners: dict[NodeIndex, Node] = {}
        self._numbers: dict[NodeIndex, NodeIndex] = {}
        self._next = 0

    def translated(self, reference: Reference) -> Reference:
        """A reference of the evaluation trace in terms of the training trace."""
        if isinstance(reference, ValueReference):
            return ValueReference(self._numbers[reference.node], reference.output)
        if isinstance(reference, BufferReference):
            return BufferReference(self._constants.get(reference.name, reference.name))
        return reference

    def place(self, node: Node) -> None:
        """Finds the node of the training trace that does in training what ``node`` does in evaluation."""
        there = with_references(node, self.translated)
        wanted = tuple(there.references())
        candidates = (found for found in self._nodes[self._next :] if _same_call(found, there))
        first = next(candidates, None)
        if first is None:
            where = f" in {node.module}" if node.module else ""
            raise TraceError(
                f"the model computes {node.operator}{where} in evaluation mode but not in training mode; "
                "make it compute the same in both, apart from dropout and the like"
            )
        same = (found for found in itertools.chain([first], candidates) if tuple(found.references()) == wanted)
        partner = self._nearest(same) or first
        self._partners[partner.index] = there
        self._numbers[node.index] = partner.index
        self._next = partner.index + 1

    def _nearest(self, nodes: Iterator[Node]) -> Node | None:
        found = next(nodes, None)
        return found if found is not None and found.index < self._next + _MATCH_WINDOW else None

    def merged(self) -> tuple[Node, ...]:
        """The training trace with evaluation arguments where they differ, and marks on what evaluation leaves out."""
        return tuple(self._merged(node) for node in self._nodes)

    def _merged(self, node: Node) -> Node:
        partner = self._partners.get(node.index)
        if partner is None:
            return dataclasses.replace(node, training_only=True)
        if partner.arguments == node.arguments:
            return node
        return dataclasses.replace(node, evaluation=partner.arguments)


def _same_call(training: Node, evaluation: Node) -> bool:
    return (
        training.operator == evaluation.operator
        and training.module == evaluation.module
        and training.outputs == evaluation.outputs
        and training.keywords == evaluation.keywords
    )


def _constant_names(training: Converted, evaluation: Converted) -> dict[str, str]:
    """Constants of the two traces that hold the same values: name in evaluation to name in training."""
    names: dict[str, str] = {}
    for name, tensor in evaluation.constants.items():
        for other, candidate in training.constants.items():
            if candidate.device.type == "cpu" and tensor.dtype == candidate.dtype and tensor.equal(candidate):
                names[name] = other
                break
        else:
            raise TraceError("the model's forward makes another constant tensor in evaluation mode than in training mode")
    return names
