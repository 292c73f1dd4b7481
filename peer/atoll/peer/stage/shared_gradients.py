"""The gradients of parameters that several nodes use, here or in other stages.

Each own use is a leaf of its own. Every holder of a parameter sends the others the gradients of its uses and sums those of all
in the graph's order, so that all arrive at the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from atoll.peer.stage.executor import Layout
from atoll.peer.stage.staging import Staging
from atoll.protocol.graph import SharedParameter, StageGraph, Use


def use_name(parameter: str, use: Use) -> str:
    """How the gradient of one use is called in a message."""
    return f"{parameter}@{use.node}:{use.position}"


class SharedGradients:
    """Of one stage; ``uses`` holds the leaf of each own use by its slot."""

    def __init__(self, graph: StageGraph, layout: Layout, uses: Mapping[int, torch.Tensor], staging: Staging) -> None:
        self._graph = graph
        self._layout = layout
        self._uses = uses
        self._staging = staging

    def sent_slots(self) -> frozenset[int]:
        """The own uses whose gradients other stages are sent."""
        return frozenset(self._layout.use(use) for shared, use in self._own() if len(shared.stages) > 1)

    def outgoing(self) -> dict[str, torch.Tensor]:
        """The gradient of each own use that other stages are sent, on the host."""
        found: dict[str, torch.Tensor] = {}
        for shared, use in self._own():
            gradient = self._uses[self._layout.use(use)].grad
            if len(shared.stages) > 1 and gradient is not None:
                found[use_name(shared.name, use)] = self._staging.to_host(gradient)
        return found

    def totals(self, tied: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The gradient of each shared parameter by its name, with the ``tied`` ones of other stages: that of its uses, summed
        in the graph's order. None where no use has one."""
        for shared in self._graph.shared:
            yield shared.name, self._total(shared, tied)

    def _total(self, shared: SharedParameter, tied: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """A gradient that was received, or is not being sent, takes the sum; one that is being sent must not change."""
        total: torch.Tensor | None = None
        ours = False
        for use in shared.uses:
            own = use.stage == self._graph.stage
            if own:
                gradient = self._uses[self._layout.use(use)].grad
            else:
                sent = tied.get(use_name(shared.name, use))
                gradient = None if sent is None else self._staging.to_device(sent)
            if gradient is None:
                continue
            free = not own or len(shared.stages) == 1
            if total is None:
                total, ours = gradient, free
            elif ours:
                total.add_(gradient)
            elif free:
                total, ours = gradient.add_(total), True
            else:
                total, ours = total + gradient, True
        return total

    def _own(self) -> Iterator[tuple[SharedParameter, Use]]:
        for shared in self._graph.shared:
            for use in shared.uses:
                if use.stage == self._graph.stage:
                    yield shared, use
