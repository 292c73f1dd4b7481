"""SGD and AdamW over named parameters, with torch's own arithmetic.

torch's functional forms are used because state here belongs to a parameter's name, and because the optimizer classes load
torch's compiler, which a peer has no use for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from atoll.protocol.assignment import OptimizerSettings


class Optimizer:
    """Holds the moments of each parameter that has been updated at least once."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._moments: dict[str, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        """One step for every parameter that has a gradient."""
        present = {name: value for name, value in parameters.items() if value.grad is not None}
        if self._settings.name == "adamw":
            self._adamw(present, learning_rate)
        else:
            self._sgd(present, learning_rate)

    def state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The moments as (parameter, moment, tensor), in the order of the first updates."""
        for name, moments in self._moments.items():
            for moment, value in moments.items():
                yield name, moment, value

    def load(self, name: str, moment: str, value: torch.Tensor) -> None:
        """Sets one moment of one parameter, as :meth:`state` gave it."""
        self._moments.setdefault(name, {})[moment] = value

    @property
    def num_bytes(self) -> int:
        """Bytes that the moments take."""
        return sum(value.numel() * value.itemsize for _, _, value in self.state())

    def _adamw(self, parameters: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        for name, parameter in parameters.items():
            if name not in self._moments:
                self._moments[name] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        moments = [self._moments[name] for name in parameters]
        adamw(
            [parameter.detach() for parameter in parameters.values()],
            [_gradient(parameter) for parameter in parameters.values()],
            [state["exp_avg"] for state in moments],
            [state["exp_avg_sq"] for state in moments],
            [],
            [state["step"] for state in moments],
            foreach=False,
            fused=False,
            amsgrad=False,
            beta1=self._settings.beta1,
            beta2=self._settings.beta2,
            lr=learning_rate,
            weight_decay=self._settings.weight_decay,
            eps=self._settings.epsilon,
            maximize=False,
        )

    def _sgd(self, parameters: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        buffers = [self._moments.get(name, {}).get("momentum_buffer") for name in parameters]
        sgd(
            [parameter.detach() for parameter in parameters.values()],
            [_gradient(parameter) for parameter in parameters.values()],
            buffers,
            foreach=False,
            fused=False,
            weight_decay=self._settings.weight_decay,
            momentum=self._settings.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=self._settings.nesterov,
            maximize=False,
        )
        for name, buffer in zip(parameters, buffers, strict=True):
            if buffer is not None:
                self._moments[name] = {"momentum_buffer": buffer}


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
