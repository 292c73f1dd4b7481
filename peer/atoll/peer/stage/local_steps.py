"""Local steps: within one step of the run each replica of a stage takes several *inner* steps on its own, and what came of
them is averaged once (DiLoCo, Douillard et al. 2023, Algorithm 1).

A step's microbatches are cut into as many equal parts as there are inner steps. A replica goes through its microbatches of a
part, and updates *inner* weights, a copy of the stage's own, with the job's optimizer. Its *change*, the stage's weights less
the inner ones, by its share of the step, takes the place of the step's gradient: replicas sum it as they sum gradients, its
norm is reported, and the commit applies it with the *outer* optimizer, SGD with Nesterov's momentum.

So the transaction of a step is what it is anywhere. The stage's own weights change with the commit alone, to the same bits on
all replicas, and what is inner is made anew at each step: a void step leaves nothing behind, and whoever has a stage's state
can take the step again.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.peer.stage.lasting import lasting_copy
from atoll.peer.stage.stage import Stage
from atoll.protocol.assignment import LocalSteps
from atoll.protocol.errors import GraphRefused
from atoll.protocol.graph import StageGraph
from atoll.protocol.ids import MicrobatchIndex, StepNumber


class LocalTraining:
    """``stage`` is the replica's own; ``inner`` goes forward and backward, with weights of its own. Raises GraphRefused for a
    stage whose replicas cannot go on for themselves."""

    def __init__(self, stage: Stage, settings: LocalSteps) -> None:
        refuse_shared_state(stage.graph)
        held = dict(stage.full_state())
        self.inner = Stage(stage.graph, replace(stage.settings, optimizer=settings.optimizer))
        names = [spec.name for spec in stage.graph.parameters] + [spec.name for spec in stage.graph.buffers]
        self.inner.adopt({name: lasting_copy(held[name]) for name in names})
        self._stage = stage
        self._count = settings.count
        self._share = self._weight = 0.0
        self._learning_rate = 0.0

    def parts(self, microbatches: tuple[MicrobatchIndex, ...], num_microbatches: int) -> list[tuple[MicrobatchIndex, ...]]:
        """Which of a replica's ``microbatches``, of a step of ``num_microbatches``, each inner step has; an inner step in which
        it has none does not happen there."""
        parts: dict[int, list[MicrobatchIndex]] = {}
        for index in microbatches:
            parts.setdefault(index * self._count // num_microbatches, []).append(index)
        return [tuple(part) for part in parts.values()]

    def begin(self, step: StepNumber) -> None:
        """A step begins: inner weights are the stage's, and their optimizer knows nothing."""
        self._share = self._weight = 0.0
        self.inner.begin(step)
        self.inner.follow(self._stage)

    def forwarded(self, scale: float, learning_rate: float) -> None:
        """A microbatch of this part of the step, and of the step's loss, goes forward."""
        self._weight += scale
        self._learning_rate = learning_rate

    def update(self) -> None:
        """The inner step: by the mean gradient of its microbatches. Raises NumericalFault for one that is not finite."""
        self.inner.finish()
        if self._weight > 0.0:
            self.inner.commit(1.0 / self._weight, self._learning_rate)
        self._share, self._weight = self._share + self._weight, 0.0

    def end(self) -> None:
        """All inner steps are done: the change is the stage's gradient."""
        self._stage.take_change(self.inner, self._share)


def refuse_shared_state(graph: StageGraph) -> None:
    """Raises GraphRefused for what other stages or later microbatches would have to follow in the middle of a step."""
    changed = [buffer.name for buffer in graph.buffers if buffer.mutated] + [shared.name for shared in graph.shared]
    if changed:
        raise GraphRefused(f"local steps cannot be taken with {changed[0]}, which changes between stages or microbatches")
