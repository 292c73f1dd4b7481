"""State that a peer keeps when its stage is taken from it: for a later stage of its own, and for others to fetch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from atoll.protocol.errors import WireError
from atoll.protocol.graph import StageGraph
from atoll.protocol.ids import StepNumber
from atoll.protocol.state import changing_names
from atoll.protocol.wording import first_of


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """Tensors by the names of ``atoll.protocol.state``, as of the committed ``step``; None: nothing is kept."""

    step: StepNumber | None = None
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(value.numel() * value.itemsize for value in self.state.values())

    def joined(self, step: StepNumber, state: Mapping[str, torch.Tensor]) -> KeptState:
        """With ``state`` of that step as well; what was kept of another step is dropped."""
        older = self.state if self.step == step else {}
        return KeptState(step=step, state={**older, **state})

    def require(self, graph: StageGraph, given: Mapping[str, torch.Tensor]) -> None:
        """Raises WireError unless all that training changes of a stage is kept or ``given``: a first value in its place would
        undo what was learned."""
        missing = sorted(name for name in changing_names(graph) if name not in self.state and name not in given)
        if missing:
            raise WireError(f"nobody was named who has the state of {first_of(missing)}")
