"""Runs ``torch.export`` on a model that lives on the meta device.

Owns how the exporter is called and how its failures are told to a person; the result is torch's ``ExportedProgram``, which
``conversion`` reads.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from atoll.coordinator.tracing.replacing import replaced
from atoll.coordinator.tracing.source import BuiltModel
from atoll.protocol.errors import TraceError

Dynamic = Mapping[str, tuple[int, ...]]
"""For each batch input, the dimensions whose size varies between microbatches."""


def default_dynamic(example: Mapping[str, Tensor]) -> Dynamic:
    """The batch dimension of every input and the second dimension of integer matrices (sequences of tokens), if above 1."""
    return {
        name: tuple(
            dimension
            for dimension, size in enumerate(tensor.shape)
            if size != 1 and (dimension == 0 or (dimension == 1 and tensor.dim() == 2 and not tensor.is_floating_point()))
        )
        for name, tensor in example.items()
    }


def meta_inputs(example: Mapping[str, Tensor], dynamic: Dynamic) -> dict[str, Tensor]:
    """Inputs of the trace. Where sizes vary they are at least 2, since the exporter takes a 1 to be always 1."""
    return {
        name: torch.empty(
            [max(size, 2) if dimension in dynamic.get(name, ()) else size for dimension, size in enumerate(tensor.shape)],
            dtype=tensor.dtype,
            device="meta",
        )
        for name, tensor in example.items()
    }


def export(model: BuiltModel, inputs: Mapping[str, Tensor], dynamic: Dynamic, *, training: bool) -> Any:
    """The exported program of ``model`` in training or evaluation mode for ``inputs`` on the meta device. Raises TraceError."""
    sizes = {name: dict.fromkeys(dynamic.get(name, ()), torch.export.Dim.AUTO) for name in inputs}
    try:
        with _mode(model.module, training), model.source.while_tracing(), _on_any_device(), _quiet():
            return torch.export.export(model.module, (), dict(inputs), dynamic_shapes=sizes, strict=False)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(_explained(model, inputs, error)) from error


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = {child: child.training for child in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for child, was_training in before.items():
            child.training = was_training


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's advice to its own users says nothing to ours."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _on_any_device() -> Iterator[None]:
    """Lets a forward be written for whatever device its inputs are on, though here that is the meta device."""
    original = torch.autocast.__init__

    def initialise(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    with replaced(torch.autocast, {"__init__": initialise}), _RealConstants():
        yield


class _RealConstants(TorchFunctionMode):
    """Makes ``torch.tensor(values, device=<meta>)`` in a forward keep its values: made on the CPU, then moved."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if (
            function in (torch.tensor, torch.asarray, torch.as_tensor)
            and device is not None
            and torch.device(device).type == "meta"
        ):
            return function(*args, **{**kwargs, "device": "cpu"}).to(device)
        return function(*args, **kwargs)


_ADVICE = (
    (
        "data-dependent",
        "the model looks at the values of a tensor (an if, a loop, .item(), nonzero()); use torch.where or masks",
    ),
    (
        "DataDependent",
        "the model looks at the values of a tensor (an if, a loop, .item(), nonzero()); use torch.where or masks",
    ),
    ("unexpected keyword argument", "its forward must take the batch's inputs by these names: {names}"),
    ("missing a required argument", "its forward must take the batch's inputs by these names and no others: {names}"),
    ("missing 1 required positional", "its forward must take the batch's inputs by these names and no others: {names}"),
    (
        "Constraints violated",
        "a size that varies between microbatches is fixed in the model; compute with tensor.shape instead",
    ),
)


def _explained(model: BuiltModel, inputs: Mapping[str, Tensor], error: Exception) -> str:
    said = str(error).strip()
    names = ", ".join(inputs)
    for mark, advice in _ADVICE:
        if mark in said or mark in type(error).__name__:
            return f"{model.source.description} cannot be traced: {advice.format(names=names)} ({first_line(error)})"
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
    return (
        f"{model.source.description} cannot be traced: {type(error).__name__}: {first_line(error)}; its forward must run with "
        f"inputs of shape {shapes} on any device, in torch operations alone"
    )


def first_line(error: BaseException) -> str:
    """Of what the error says, if it says anything."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"
