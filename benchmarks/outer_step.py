"""Local steps: replicas behind slow links train on their own for a while, then average what came of it (DiLoCo, Douillard
et al., 2023).

Each replica starts from the same weights, the *anchor*, and takes H *inner* steps with its own optimizer on its own
microbatches. Its *change* is the anchor less its weights then. The mean of the replicas' changes, weighted by their tokens,
is the gradient of one *outer* step from the anchor, by SGD with Nesterov's momentum; what comes of it is the next anchor,
the same bits on every replica, for every one computes it from the same mean. So replicas exchange values once in H steps.

Runs do this with inner optimizers that begin anew after each outer step (``atoll.peer.stage.local_steps``); here they may as
well keep their moments, to see what that is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.peer.averaging.averager import weighted_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """``every`` is H. The learning rate and the momentum are the outer step's; these are DiLoCo's."""

    every: int
    learning_rate: float = 0.7
    momentum: float = 0.9

    def is_outer(self, step: int) -> bool:
        """Whether replicas average after ``step``, counted from 1."""
        return step % self.every == 0


class OuterOptimizer:
    """Of one stage's weights, on one replica. Weights come and go by name, as fp32 or what they are kept in."""

    def __init__(self, settings: LocalSteps, weights: Mapping[str, Tensor]) -> None:
        self._settings = settings
        self._anchor = {name: weight.detach().clone() for name, weight in weights.items()}
        self._momentum: dict[str, Tensor] = {}

    def change(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this replica has to average: by how much its weights went down since the anchor."""
        return {name: anchor - weights[name].detach() for name, anchor in self._anchor.items()}

    def step(self, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The next weights, which are the next anchor, given the mean change of all replicas."""
        for name, anchor in self._anchor.items():
            gradient = mean[name].to(anchor)
            before = self._momentum.get(name)
            momentum = gradient.clone() if before is None else before * self._settings.momentum + gradient
            direction = gradient + momentum * self._settings.momentum
            self._anchor[name], self._momentum[name] = anchor - direction * self._settings.learning_rate, momentum
        return {name: anchor.clone() for name, anchor in self._anchor.items()}


def mean_change(changes: Sequence[Mapping[str, Tensor]], tokens: Sequence[int]) -> dict[str, Tensor]:
    """What a round of averaging gives, for those who have all changes at hand."""
    weights, total = [float(count) for count in tokens], float(sum(tokens))
    return {name: weighted_sum([change[name] for change in changes], weights, total) for name in changes[0]}
