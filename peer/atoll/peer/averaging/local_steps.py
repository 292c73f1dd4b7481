"""Local steps: replicas behind slow links train on their own for a while, then average what came of it (DiLoCo, Douillard
et al., 2023).

Each replica starts from the same weights, the *anchor*, and takes H *inner* steps with its own optimizer on its own
microbatches. Its *change* is the anchor less its weights then. The mean of the replicas' changes, weighted by their tokens,
is the gradient of one *outer* step from the anchor, by SGD with Nesterov's momentum; what comes of it is the next anchor,
the same bits on every replica, for every one computes it from the same mean. So replicas exchange values once in H steps.
Inner optimizers keep their moments.

The anchor and the momentum belong to parameters' names, as weights do. An outer step is a transaction:
:meth:`OuterOptimizer.step` changes nothing that lasts before :meth:`OuterOptimizer.commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


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
        self._pending: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    def change(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this replica has to average: by how much its weights went down since the anchor."""
        return {name: anchor - weights[name].detach() for name, anchor in self._anchor.items()}

    def step(self, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The next weights, given the mean change of all replicas; :meth:`commit` makes them the anchor."""
        anchors, momenta = {}, {}
        for name, anchor in self._anchor.items():
            gradient = mean[name].to(anchor)
            before = self._momentum.get(name)
            momentum = gradient.clone() if before is None else before * self._settings.momentum + gradient
            direction = gradient + momentum * self._settings.momentum
            anchors[name], momenta[name] = anchor - direction * self._settings.learning_rate, momentum
        self._pending = anchors, momenta
        return {name: anchor.clone() for name, anchor in anchors.items()}

    def commit(self) -> None:
        """The outer step has happened."""
        assert self._pending is not None, "there is no outer step to commit"
        (self._anchor, self._momentum), self._pending = self._pending, None

    def void(self) -> None:
        """It has not."""
        self._pending = None

    def state(self) -> dict[str, Tensor]:
        """What must outlive this replica: ``NAME`` with the anchor and ``NAME/momentum`` with the momentum of each
        parameter."""
        return dict(self._anchor) | {f"{name}/momentum": momentum for name, momentum in self._momentum.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`state`, for the parameters that this stage has."""
        self._anchor = {name: state[name].detach().clone() for name in self._anchor}
        self._momentum = {
            name: state[f"{name}/momentum"].detach().clone() for name in self._anchor if f"{name}/momentum" in state
        }
        self._pending = None


def mean_change(changes: Sequence[Mapping[str, Tensor]], tokens: Sequence[int]) -> dict[str, Tensor]:
    """What a round of averaging gives, for those who have all changes at hand."""
    from atoll.peer.averaging.averager import weighted_sum

    weights, total = [float(count) for count in tokens], float(sum(tokens))
    return {name: weighted_sum([change[name] for change in changes], weights, total) for name in changes[0]}
