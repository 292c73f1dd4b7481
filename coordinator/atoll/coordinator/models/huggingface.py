"""Models of the ``transformers`` library from their configuration, with their loss.

The only module that imports ``transformers``, and only when such a model is made: a peer never needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.coordinator.tracing.export import first_line
from atoll.coordinator.tracing.replacing import replaced
from atoll.coordinator.tracing.source import ModelSource
from atoll.protocol.errors import TraceError


class CausalLanguageModel(nn.Module):
    """A decoder and its loss; ``targets`` are the next tokens, so nothing is shifted here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at each position."""
        found: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return found

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


class ImageClassifier(nn.Module):
    """A classifier of images and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def logits(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        found: Tensor = self.model(pixel_values=images).logits
        return found

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.logits(images), labels)


_TASKS: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "causal-lm": ("AutoModelForCausalLM", CausalLanguageModel),
    "image-classification": ("AutoModelForImageClassification", ImageClassifier),
}


def huggingface_source(config: Path, task: str) -> ModelSource:
    """The model that the configuration file (or its folder) describes, for ``task``."""
    maker, wrapper = _TASKS[task]
    description = f"the Hugging Face model of {config}"

    def make() -> nn.Module:
        transformers = quiet_transformers()
        path = config / "config.json" if config.is_dir() else config
        try:
            settings = transformers.AutoConfig.from_pretrained(str(path))
            with _initialised_anywhere():
                model = getattr(transformers, maker).from_config(settings)
        except (ValueError, KeyError, OSError) as error:
            raise TraceError(f"{description} cannot be made for {task}: {first_line(error)}") from error
        if next(model.parameters()).is_meta:
            model.initialize_weights()  # which the constructor leaves out on the meta device
        return wrapper(model)

    return ModelSource(description=description, make=make, inner="model", while_tracing=_as_when_executed)


def quiet_transformers() -> Any:
    """The library, without its warnings. Raises TraceError where it is not installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configurations are files here; nothing is ever downloaded
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise TraceError("a Hugging Face model needs the package transformers: pip install 'atoll[huggingface]'") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def _initialised_anywhere() -> Iterator[None]:
    """Makes constructors initialise their weights on the meta device too, where they would skip that: it is being recorded."""
    modeling = importlib.import_module("transformers.modeling_utils")
    with replaced(modeling, {"get_torch_context_manager_or_global_device": lambda: torch.device("cpu")}):
        yield


@contextlib.contextmanager
def _as_when_executed() -> Iterator[None]:
    """Makes attention masks as an ordinary call does.

    While a model is traced, transformers builds masks that are also right for caches and packed sequences. Neither occurs here
    (no cache, positions counted from 0), and the plain causal kernel is both faster and bit for bit what training without
    Atoll computes.
    """
    masking_utils = importlib.import_module("transformers.masking_utils")
    settled = {
        "is_tracing": lambda tensor=None: False,
        "is_torchdynamo_exporting": lambda: False,
        "find_packed_sequence_indices": lambda position_ids: None,
    }
    with replaced(masking_utils, settled):
        yield
