"""The ``model`` section of a job: a built-in model, a Hugging Face configuration, or the user's own factory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, ValidationError, ValidationInfo, field_validator, model_validator

from atoll.protocol.job_errors import WrongValue, listed, show, wrong_value
from atoll.protocol.job_fields import ExistingFile, ExistingPath, Fraction, Positive, Section, resolve

_CONFIG_KEYS = {
    "context": ("n_positions", "max_position_embeddings"),
    "vocabulary": ("vocab_size",),
    "classes": ("num_labels",),
}
KINDS = ("builtin", "huggingface", "factory")


class GptOptions(Section):
    """Options of the built-in GPT: pre-norm decoder, learned positions."""

    layers: Annotated[Positive, Field(examples=[8])] = 8
    width: Annotated[Positive, Field(examples=[192])] = 192
    """Size of a token's vector between the layers; a multiple of ``heads``."""
    heads: Annotated[Positive, Field(examples=[6])] = 6
    context: Annotated[Positive, Field(examples=[256])] = 256
    """Longest sequence."""
    vocabulary: Annotated[Positive, Field(examples=[256])] = 256
    """Number of token ids."""
    dropout: Fraction = 0.0
    tied: bool = True
    """The output layer shares its weights with the token embedding."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads:
            fits = [str(heads) for heads in range(1, min(self.width, 4 * self.heads) + 1) if self.width % heads == 0]
            near = sorted(sorted(fits, key=lambda heads: abs(int(heads) - self.heads))[:3], key=int)
            raise WrongValue("heads", f"{self.heads} does not divide model.options.width ({self.width}); use {listed(near)}")
        return self


class ResNetOptions(Section):
    """Options of the built-in ResNet."""

    depth: Annotated[Literal[18, 34, 50, 101], Field(examples=[18])] = 18
    classes: Annotated[Positive, Field(examples=[10])] = 10
    stem: Literal["small", "imagenet"] = "small"
    """``small`` keeps the resolution (images up to about 64 pixels), ``imagenet`` starts with a 7x7 stride and a pooling."""


class HuggingFaceModel(Section):
    """A model of the ``transformers`` library, made from its configuration; weights are initialised, not downloaded."""

    config: ExistingPath
    """A ``config.json``, or a folder that has one."""
    task: Literal["causal-lm", "image-classification"] = "causal-lm"

    @field_validator("config")
    @classmethod
    def _a_configuration(cls, path: Path) -> Path:
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise WrongValue("", f"{str(path)!r} has no config.json; give a folder that has one")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise WrongValue("", f"{str(file)!r} is not JSON ({error}); give a model's config.json") from error
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise WrongValue("", f"{str(file)!r} has no model_type; give the config.json of a model")
        return file

    def number(self, key: str) -> int | None:
        """What the configuration says of ``key``, if that is a whole number."""
        value = json.loads(self.config.read_text(encoding="utf-8")).get(key)
        return value if type(value) is int else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimit:
    """A size of the model that the data must not exceed: ``setting`` of the job's ``field`` says it."""

    field: str
    setting: str
    value: int

    def exceeded(self, wanted: int, by: str) -> WrongValue:
        """The error of data that wants more; ``by`` says which."""
        name = self.setting if self.setting != self.field.rpartition(".")[2] else ""
        return WrongValue(self.field, f"{name} {self.value} is less than {by}; raise it to {wanted}".lstrip())


_OPTIONS: dict[str, type[GptOptions | ResNetOptions]] = {"gpt": GptOptions, "resnet": ResNetOptions}


def _options_of_the_kind(value: object, info: ValidationInfo) -> GptOptions | ResNetOptions | dict[str, Any]:
    """Options mean what the kind of model, checked before them, says."""
    builtin = info.data.get("builtin")
    options = {} if value is None else value
    if builtin is not None:
        try:
            return _OPTIONS[builtin].model_validate(options)
        except ValidationError as error:
            raise wrong_value(error, _OPTIONS[builtin]) from error
    if not isinstance(options, dict):
        raise WrongValue("", f"{show(value)} is not a group of keys; write the factory's keyword arguments")
    if options and info.data.get("huggingface") is not None:
        raise WrongValue("", f"{show(value)} has no meaning for model.huggingface; change its config file instead")
    return options


class ModelSection(Section):
    """Exactly one of ``builtin``, ``huggingface`` and ``factory``."""

    builtin: Annotated[Literal["gpt", "resnet"] | None, Field(examples=["gpt"])] = None
    huggingface: HuggingFaceModel | None = None
    factory: str | None = None
    """``path/to/file.py:function``; returns a module whose ``forward`` takes the batch by name and returns the loss."""
    options: Annotated[GptOptions | ResNetOptions | dict[str, Any], PlainValidator(_options_of_the_kind)] = Field(
        default_factory=dict, validate_default=True
    )
    """Options of the built-in model, or keyword arguments of the factory."""
    weights: ExistingFile | None = None
    """A safetensors file to start from, with the names of the model's state dict."""

    @property
    def input_kind(self) -> Literal["tokens", "images"] | None:
        """What the model's forward takes; None when only the factory knows."""
        if self.builtin is not None:
            return "tokens" if self.builtin == "gpt" else "images"
        if self.huggingface is not None:
            return "tokens" if self.huggingface.task == "causal-lm" else "images"
        return None

    def limit(self, kind: Literal["context", "vocabulary", "classes"]) -> ModelLimit | None:
        """How much of ``kind`` the model takes, as far as the job says it."""
        if self.huggingface is not None:
            for key in _CONFIG_KEYS[kind]:
                value = self.huggingface.number(key)
                if value is not None:
                    return ModelLimit(field="model.huggingface.config", setting=key, value=value)
            return None
        value = getattr(self.options, kind, None)
        return None if value is None else ModelLimit(field=f"model.options.{kind}", setting=kind, value=value)

    @property
    def description(self) -> str:
        """The model as error messages call it."""
        return f"model.builtin {self.builtin}" if self.builtin else "model.huggingface" if self.huggingface else "model.factory"

    @property
    def factory_parts(self) -> tuple[Path, str]:
        """The file and the function of ``factory``; only for jobs that have one."""
        assert self.factory is not None
        path, _, function = self.factory.rpartition(":")
        return Path(path), function

    @field_validator("factory")
    @classmethod
    def _file_and_function(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        path, _, function = value.rpartition(":")
        if not path.endswith(".py") or not function.isidentifier():
            raise WrongValue("", f"{show(value)} does not name a function; write path/to/file.py:function")
        resolved = resolve(path, info)
        if not resolved.is_file():
            raise WrongValue("", f"there is no file {str(resolved)!r}; paths are relative to the job file's folder")
        return f"{resolved}:{function}"

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = f"{listed(given, 'and')} are given" if given else "no model is given"
            raise WrongValue("", f"{found}; give exactly one of {listed(KINDS)}")
        return self
