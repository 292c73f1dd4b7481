"""Where a model comes from: a built-in one, a Hugging Face configuration, or the user's own factory.

A source builds the module on the meta device under the initialisation recorder, so a model larger than this machine's memory
can be built, and knows how to build it for real where a whole model is wanted (sampling text, tests).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from atoll.coordinator.models.gpt import GPT
from atoll.coordinator.models.resnet import ResNet
from atoll.coordinator.tracing.initialisation import Recording, recording
from atoll.coordinator.tracing.state_names import StateNames
from atoll.protocol.errors import TraceError
from atoll.protocol.job_model import ModelSection

_BUILTIN: Mapping[str, Callable[..., nn.Module]] = {"gpt": GPT, "resnet": ResNet}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """How to make a model.

    ``make`` returns the module whose ``forward`` takes the batch by name and returns the loss, or the loss and a dict of
    metrics. ``inner`` names the submodule whose state dict the weights are named after ("" for the module itself).
    ``while_tracing`` is entered around each trace.
    """

    description: str
    make: Callable[[], nn.Module]
    inner: str = ""
    while_tracing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def build(self) -> BuiltModel:
        """The model on the meta device, with the record of how its tensors are initialised. Raises TraceError."""
        try:
            with recording() as record:
                module = self._made()
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"{self.description} cannot be built without data (on torch's meta device): {type(error).__name__}: {error}"
            ) from error
        record.move_to_meta(module)
        return BuiltModel(source=self, module=module, recording=record)

    def build_real(self, device: str = "cpu") -> nn.Module:
        """The module with real weights on ``device``, as its constructor makes them."""
        with torch.device(device):
            return self._made()

    def state_module(self, module: nn.Module) -> nn.Module:
        """The part of ``module`` whose state dict names the weights."""
        return module.get_submodule(self.inner)

    def _made(self) -> nn.Module:
        module = self.make()
        if not isinstance(module, nn.Module):
            raise TraceError(f"{self.description} returned {type(module).__name__}; it must return a torch.nn.Module")
        return module.train()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A module on the meta device and how its tensors are initialised.

    ``constants`` are tensors that its forward makes from Python numbers, by their names in the op graph; filled by the trace.
    """

    source: ModelSource
    module: nn.Module
    recording: Recording = field(repr=False)
    constants: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def state_module(self) -> nn.Module:
        """The part whose state dict names the weights."""
        return self.source.state_module(self.module)

    def computed_value(self, name: str, run_seed: int) -> Tensor:
        """The first value of a parameter or buffer that peers cannot make themselves; after the trace, on any thread.

        Random numbers are seeded as peers seed them, by the run's seed and the tensor's name.
        """
        if name in self.constants:
            return self.constants[name]
        names = StateNames(self.state_module)
        return self.recording.value(names.named(name), run_seed)


def open_source(model: ModelSection) -> ModelSource:
    """The source that a job's ``model`` section names."""
    if model.huggingface is not None:
        from atoll.coordinator.models.huggingface import huggingface_source

        return huggingface_source(model.huggingface.config, model.huggingface.task)
    options = model.options if isinstance(model.options, dict) else model.options.model_dump()
    if model.builtin is not None:
        make = _BUILTIN[model.builtin]
        return ModelSource(description=f"the built-in model {model.builtin}", make=lambda: make(**options))
    path, function = model.factory_parts
    return factory_source(path, function, options)


def factory_source(path: Path, function: str, options: Mapping[str, Any] | None = None) -> ModelSource:
    """The source of the user's ``function`` in the Python file ``path``, called with ``options``."""
    description = f"{path}:{function}"

    def make() -> nn.Module:
        found = getattr(_imported(path), function, None)
        if not callable(found):
            raise TraceError(f"{path} has no function {function}")
        given = dict(options or {})
        try:
            inspect.signature(found).bind(**given)
        except TypeError as error:
            raise TraceError(f"{description} cannot be called with model.options {given}: {error}") from error
        made: nn.Module = found(**given)
        return made

    return ModelSource(description=description, make=make)


def _imported(path: Path) -> ModuleType:
    """The user's file as a module; its folder is importable meanwhile and after, as for a script."""
    name = f"atoll_factory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise TraceError(f"there is no Python file {path}")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
