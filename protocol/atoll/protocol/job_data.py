"""The ``data`` section of a job: where the samples come from. The feeds themselves are the coordinator's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from atoll.protocol.job_errors import WrongValue, listed, show
from atoll.protocol.job_fields import GLOB_CHARACTERS, ExistingFile, ExistingFolder, Positive, Section, existing, resolve

SOURCES = ("text", "tokens", "images", "arrays", "random")
BYTE_VALUES = 256

InputKind: TypeAlias = Literal["tokens", "images"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLimits:
    """What the data asks of a model: (field to name in an error, value)."""

    lengths: tuple[tuple[str, int], ...] = ()
    vocabularies: tuple[tuple[str, int], ...] = ()
    classes: tuple[tuple[str, int], ...] = ()


def _lengths(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    lengths = tuple(value) if isinstance(value, list | tuple) else ()
    if not lengths or not all(type(length) is int and length >= 1 for length in lengths):
        raise WrongValue("", f"{show(value)} is not a list of lengths; write whole numbers, for example [64, 128, 33]")
    return lengths


def _arrays(value: object, info: ValidationInfo) -> dict[str, Path] | Path | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        return existing(value, info, "file")
    found = {}
    for name, path in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise WrongValue("", f"{show(name)} is not the name of an input of the model's forward; write for example images")
        try:
            found[name] = existing(path, info, "file")
        except WrongValue as error:
            raise WrongValue(name, error.message) from error
    if not found:
        raise WrongValue("", "{} names no array; write for example {images: x.npy, labels: y.npy}")
    return found


class RandomData(Section):
    """Data made up from the seed, for benchmarks and tests."""

    kind: Literal["tokens", "images"] = "tokens"
    samples: Annotated[Positive, Field(examples=[65536])] = 65536
    """Different samples; after that many an epoch ends."""
    vocabulary: Annotated[Positive, Field(examples=[256])] = 256
    """Token ids are below this (tokens)."""
    lengths: Annotated[tuple[int, ...] | None, BeforeValidator(_lengths)] = None
    """Microbatch m has sequences of ``lengths[m % len(lengths)]``; null: all of ``data.sequence_length`` (tokens)."""
    classes: Annotated[Positive, Field(examples=[10])] = 10
    """Labels are below this (images)."""
    channels: Annotated[Positive, Field(examples=[3])] = 3
    """Channels of an image (images); its sides are ``data.image_size``."""

    @model_validator(mode="after")
    def _belongs_to_the_kind(self) -> Self:
        foreign = {"tokens": ("classes", "channels"), "images": ("vocabulary", "lengths")}[self.kind]
        for key in foreign:
            if key in self.model_fields_set:
                raise WrongValue(key, f"{show(getattr(self, key))} has no meaning for random {self.kind}; remove it")
        return self


def _random(value: object) -> object:
    return {"kind": value} if isinstance(value, str) else value


class DataSection(Section):
    """Exactly one of ``text``, ``tokens``, ``images``, ``arrays`` and ``random``."""

    text: str | None = None
    """``stdlib`` (the Python standard library's sources on this machine), a file, a folder or a glob; read as bytes."""
    tokens: ExistingFile | None = None
    """Token ids in one file: ``.npy`` of one dimension, or ``.bin`` of little-endian 16-bit numbers."""
    images: ExistingFolder | None = None
    """A folder with one folder of images a class; classes are numbered in the order of their names."""
    arrays: Annotated[dict[str, Path] | Path | None, BeforeValidator(_arrays)] = None
    """The inputs of the model's forward by name: ``{images: x.npy, labels: y.npy}``, or an ``.npz`` made by ``numpy.savez``."""
    random: Annotated[RandomData | None, BeforeValidator(_random)] = None
    """Made-up data: ``tokens``, ``images`` or a group of keys."""
    tokenizer: Annotated[str, Field(examples=["bytes"])] = "bytes"
    """``bytes``, or a ``tokenizer.json`` of the ``tokenizers`` library (text)."""
    sequence_length: Annotated[Positive, Field(examples=[256])] = 256
    """Tokens in a sample (text, tokens, random tokens)."""
    image_size: Annotated[Positive, Field(examples=[32])] = 32
    """Sides of an image in pixels: scaled to it, then cut from the middle (images, random images)."""
    validation: Annotated[float, Field(ge=0.0, le=0.5, examples=[0.02])] = 0.0
    """Fraction of the samples that is kept for evaluation and never trained on."""

    @property
    def source(self) -> str:
        """Which of the kinds this is."""
        return next(kind for kind in SOURCES if getattr(self, kind) is not None)

    @property
    def input_kind(self) -> InputKind | None:
        """What the samples are; None for arrays, whose names say it."""
        if self.random is not None:
            return self.random.kind
        if self.arrays is not None:
            return None
        return "images" if self.images is not None else "tokens"

    @property
    def limits(self) -> DataLimits:
        """What can be said before the data is opened."""
        if self.random is not None and self.random.kind == "images":
            return DataLimits(classes=(("data.random.classes", self.random.classes),))
        if self.random is not None:
            vocabulary = (("data.random.vocabulary", self.random.vocabulary),)
            if self.random.lengths is not None:
                return DataLimits(lengths=(("data.random.lengths", max(self.random.lengths)),), vocabularies=vocabulary)
            return DataLimits(lengths=(("data.sequence_length", self.sequence_length),), vocabularies=vocabulary)
        if self.input_kind == "tokens":
            bytewise = self.text is not None and self.tokenizer == "bytes"
            return DataLimits(
                lengths=(("data.sequence_length", self.sequence_length),),
                vocabularies=(("data.tokenizer", BYTE_VALUES),) if bytewise else (),
            )
        return DataLimits()

    @field_validator("text")
    @classmethod
    def _stdlib_or_path(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or value == "stdlib":
            return value
        if not value:
            raise WrongValue("", "'' is not a path; write stdlib, or the path of a file, a folder or a glob")
        path = resolve(value, info)
        if not GLOB_CHARACTERS & set(value) and not path.exists():
            raise WrongValue(
                "", f"there is no file or folder {str(path)!r}; write stdlib or a path relative to the job file's folder"
            )
        return str(path)

    @field_validator("tokenizer")
    @classmethod
    def _bytes_or_file(cls, value: str, info: ValidationInfo) -> str:
        if value == "bytes":
            return value
        path = resolve(value, info)
        if not path.is_file():
            raise WrongValue("", f"there is no file {str(path)!r}; write bytes or the path of a tokenizer.json")
        return str(path)

    @model_validator(mode="after")
    def _relations(self) -> Self:
        given = [kind for kind in SOURCES if getattr(self, kind) is not None]
        if len(given) != 1:
            found = f"{listed(given, 'and')} are given" if given else "no data is given"
            raise WrongValue("", f"{found}; give exactly one of {listed(SOURCES)} (set the others to null)")
        if self.text is None and "tokenizer" in self.model_fields_set and self.tokenizer != "bytes":
            raise WrongValue(
                "tokenizer", f"{show(self.tokenizer)} has no meaning for data.{given[0]}; remove it or use data.text"
            )
        return self
