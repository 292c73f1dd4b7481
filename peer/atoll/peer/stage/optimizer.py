"""SGD and AdamW over named parameters, with torch's own arithmetic.

torch's functional forms are used because state here belongs to a parameter's name, and because the optimizer classes load
torch's compiler, which a peer has no use for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from atoll.peer.stage.lasting import lasting_zeros_like
from atoll.protocol.assignment import OptimizerSettings

_PIECE = 2**20  # elements: a few megabytes of temporaries, and still far more than calling the kernels costs


class Optimizer:
    """Holds the moments of each parameter that has been updated at least once."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._moments: dict[str, dict[str, torch.Tensor]] = {}
        self._room: dict[str, dict[str, torch.Tensor]] = {}

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Makes room for the moments, before memory is full of what comes and goes."""
        for name, parameter in parameters.items():
            if name not in self._moments:
                self._room[name] = self._zeros(parameter)

    def forget(self) -> None:
        """The next update of each parameter is its first; the room for its moments stays."""
        for name, moments in self._moments.items():
            for value in moments.values():
                value.zero_()
            self._room[name] = moments
        self._moments = {}

    def _zeros(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._settings.name == "adamw":
            first, second = lasting_zeros_like(parameter), lasting_zeros_like(parameter)
            return {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
        return {"momentum_buffer": lasting_zeros_like(parameter)} if self._settings.momentum else {}

    def _begun(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The moments of a parameter, at its first update the ones that room was made for."""
        if name not in self._moments:
            self._moments[name] = self._room.pop(name) if name in self._room else self._zeros(parameter)
        return self._moments[name]

    @torch.no_grad()
    def update(self, parameters: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        """One step for every parameter that has a gradient."""
        step = self._adamw if self._settings.name == "adamw" else self._sgd
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                step(name, parameter.detach(), parameter.grad, learning_rate)

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
        """Bytes that the moments take, and the room that was made for first ones."""
        held = (*self._moments.values(), *self._room.values())
        return sum(value.numel() * value.itemsize for moments in held for value in moments.values())

    def _adamw(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, learning_rate: float) -> None:
        moments = self._begun(name, parameter)
        before = moments["step"].clone()
        for part, slope, first, second in pieces(parameter, gradient, moments["exp_avg"], moments["exp_avg_sq"]):
            moments["step"].copy_(before)
            adamw(
                [part],
                [slope],
                [first],
                [second],
                [],
                [moments["step"]],
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

    def _sgd(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, learning_rate: float) -> None:
        first = name not in self._moments
        buffers = self._begun(name, parameter).values()
        for part, slope, *moment in pieces(parameter, gradient, *buffers):
            # At the first update torch makes the momentum, of the gradient.
            made = [moment[0] if moment and not first else None]
            self._sgd_step(part, slope, made, learning_rate)
            if moment and first and made[0] is not None:
                moment[0].copy_(made[0])

    def _sgd_step(
        self, parameter: torch.Tensor, gradient: torch.Tensor, buffers: list[torch.Tensor | None], learning_rate: float
    ) -> None:
        sgd(
            [parameter],
            [gradient],
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


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of tensors of one shape, a piece of each at a time, so that what is computed from them takes little memory.

    Only where all lie in memory in the same, plain order. Pieces are whole multiples of any processor's vectors: element by
    element the results are those of the tensors in one piece.
    """
    count = tensors[0].numel()
    if count <= _PIECE or not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    flat = [tensor.view(-1) for tensor in tensors]
    for start in range(0, count, _PIECE):
        yield tuple(tensor[start : start + _PIECE] for tensor in flat)


def squared_norm(gradient: torch.Tensor | None) -> float:
    """The square of the gradient's norm in double precision; 0.0 for a parameter that got none."""
    if gradient is None:
        return 0.0
    if gradient.device.type == "mps":  # has no double precision
        gradient = gradient.cpu()
    # torch makes a copy in double precision, so a large gradient is looked at piece by piece.
    return sum(float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2 for (piece,) in pieces(gradient))
