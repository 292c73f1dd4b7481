"""The backward pass of one microbatch on one stage, in two halves.

Theory of operation. What the stages before this one wait for is the gradient with respect to the values received from them.
The gradients of the weights can wait. So :func:`backward` computes the first and returns the second as :class:`Deferred` work.

The autograd graph is walked once. A *crossing* is a node through which a received value is reached, and which also has an
argument that depends on parameters alone: for a linear layer, the matrix product. The first half runs autograd towards the
received values only, and captures the gradient that arrives at each crossing. The second half starts again at each crossing
with the captured gradient and runs towards its parameters only; nothing is computed twice except within the crossing itself,
whose kernels compute the gradient of each argument separately. A parameter that is reached through several crossings, or
without any, gets its gradient in the first half; so do the vectors of a crossing without a matrix (a normalisation), whose
kernels would read their operands a second time for little work.

Bits. Autograd executes nodes in descending order of creation, whichever of them take part, and adds up what arrives at a node
in that order. Leaving nodes out changes neither, so both halves together give what one ``torch.autograd.backward`` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(frozen=True, slots=True)
class Deferred:
    """The second half at one crossing: adds to ``.grad`` of the leaves."""

    edges: tuple[GradientEdge, ...]
    gradients: tuple[torch.Tensor, ...]
    leaves: tuple[torch.Tensor, ...]

    def run(self) -> None:
        torch.autograd.backward(self.edges, self.gradients, inputs=self.leaves)


@dataclass(slots=True)
class _Visited:
    """What is reached from one autograd node. ``leaves`` are the parameters below a node that reaches nothing received."""

    node: Node
    children: tuple[tuple[Node, int], ...]
    receives: bool = False
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)


def backward(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor | None, ...], tuple[Deferred, ...]]:
    """The gradients of the ``received`` leaves, and the work left to add to the parameters' ``.grad``.

    Without received leaves everything is done at once. A received value that the roots do not depend on has gradient None.
    """
    if not roots:
        return (None,) * len(received), ()
    if not received:
        torch.autograd.backward(roots, gradients)
        return (), ()
    visited = _walk(roots, {id(leaf) for leaf in received})
    joint, crossings = _crossings(roots, visited)
    wanted = [get_gradient_edge(leaf) for leaf in (*received, *joint)]
    captured = [GradientEdge(entry.node, output) for entry, _ in crossings for output in sorted(entry.outputs)]
    found = torch.autograd.grad(roots, wanted + captured, gradients, retain_graph=bool(crossings), allow_unused=True)
    for leaf, gradient in zip(joint, found[len(received) :], strict=False):
        _accumulate(leaf, gradient)
    return found[: len(received)], _deferred(crossings, found[len(wanted) :])


def _walk(roots: Sequence[GradientEdge], received: set[int]) -> dict[Node, _Visited]:
    """Every autograd node below the roots, each after those below it."""
    visited: dict[Node, _Visited] = {}
    entered: set[Node] = set()
    stack = [root.node for root in roots]
    while stack:
        node = stack[-1]
        if node in visited:
            stack.pop()
            continue
        children = tuple((child, output) for child, output in node.next_functions if child is not None)
        missing = [child for child, _ in children if child not in visited]
        if missing and node not in entered:
            entered.add(node)
            stack.extend(missing)
            continue
        stack.pop()
        visited[node] = _visit(node, children, visited, received)
    for root in roots:
        visited[root.node].outputs.add(root.output_nr)
    return visited


def _visit(node: Node, children: tuple[tuple[Node, int], ...], visited: dict[Node, _Visited], received: set[int]) -> _Visited:
    entry = _Visited(node, children)
    leaf = getattr(node, "variable", None)
    if leaf is not None:
        if id(leaf) in received:
            entry.receives = True
        else:
            entry.leaves[id(leaf)] = leaf
    for child, output in children:
        below = visited[child]
        below.outputs.add(output)
        entry.receives |= below.receives
    if not entry.receives:
        for child, _ in children:
            entry.leaves.update(visited[child].leaves)
    return entry


def _crossings(
    roots: Sequence[GradientEdge], visited: dict[Node, _Visited]
) -> tuple[list[torch.Tensor], list[tuple[_Visited, list[torch.Tensor]]]]:
    """The leaves to do at once, and each crossing with the leaves that are reached through it alone."""
    leaves: dict[int, torch.Tensor] = {}
    above: dict[int, set[Node | None]] = {}
    for root in roots:
        for key, leaf in visited[root.node].leaves.items():
            leaves[key] = leaf
            above.setdefault(key, set()).add(None)
    for entry in visited.values():
        if not entry.receives:
            continue
        for child, _ in entry.children:
            for key, leaf in visited[child].leaves.items():
                leaves[key] = leaf
                above.setdefault(key, set()).add(entry.node)
    joint: list[torch.Tensor] = []
    alone: dict[Node, list[torch.Tensor]] = {}
    for key, nodes in above.items():
        node = next(iter(nodes))
        if len(nodes) > 1 or node is None:
            joint.append(leaves[key])
        else:
            alone.setdefault(node, []).append(leaves[key])
    deferred = {node: below for node, below in alone.items() if any(leaf.dim() > 1 for leaf in below)}
    joint += [leaf for node, below in alone.items() if node not in deferred for leaf in below]
    return joint, [(visited[node], below) for node, below in deferred.items()]


def _deferred(
    crossings: list[tuple[_Visited, list[torch.Tensor]]], captured: Sequence[torch.Tensor | None]
) -> tuple[Deferred, ...]:
    works: list[Deferred] = []
    start = 0
    for entry, leaves in crossings:
        outputs = sorted(entry.outputs)
        pairs = [
            (GradientEdge(entry.node, output), gradient)
            for output, gradient in zip(outputs, captured[start : start + len(outputs)], strict=True)
            if gradient is not None
        ]
        start += len(outputs)
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            works.append(Deferred(edges, gradients, tuple(leaves)))
    return tuple(works)


def _accumulate(leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Adds to ``leaf.grad`` as autograd does, keeping the leaf's memory layout."""
    if gradient is None:
        return
    if leaf.grad is None:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)
    else:
        leaf.grad.add_(gradient)
