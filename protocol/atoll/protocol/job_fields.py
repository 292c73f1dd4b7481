"""Kinds of fields in a job file: paths, ``auto`` or a number. A validator's error is the rest of a sentence about the field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo

from atoll.protocol.job_errors import WrongValue, show

GLOB_CHARACTERS = frozenset("*?[")


class Section(BaseModel):
    """Root of the sections of a job: frozen, no unknown keys, no silent conversions (``"20"`` is not 20)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def resolve(value: str | Path, info: ValidationInfo) -> Path:
    """``value`` as an absolute path, relative to the folder of the job file; one that may be looked up. Raises WrongValue."""
    base: Path = (info.context or {}).get("base", Path())
    try:
        path = (base / Path(value).expanduser()).resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, forbidden, of a user that there is none of
        reason = getattr(error, "strerror", None) or error
        raise WrongValue("", f"{show(str(value))} cannot be looked up ({reason}); write another path") from error
    return path


def existing(value: object, info: ValidationInfo, what: str) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise WrongValue("", f"{show(value)} is not a path; write the path of a {what}")
    path = resolve(value, info)
    if not path.exists():
        raise WrongValue("", f"there is no {what} {str(path)!r}; paths are relative to the job file's folder")
    if what != "file or folder" and path.is_dir() != (what == "folder"):
        raise WrongValue("", f"{str(path)!r} is not a {what}; write the path of a {what}")
    return path


def _existing_file(value: object, info: ValidationInfo) -> Path:
    return existing(value, info, "file")


def _existing_folder(value: object, info: ValidationInfo) -> Path:
    return existing(value, info, "folder")


def _existing_path(value: object, info: ValidationInfo) -> Path:
    return existing(value, info, "file or folder")


def _auto_or_positive(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WrongValue("", f"{show(value)} is not possible; write auto or a whole number of at least 1")
    return value


def _auto_or_boolean(value: object) -> bool | Literal["auto"]:
    if value == "auto":
        return "auto"
    if not isinstance(value, bool):
        raise WrongValue("", f"{show(value)} is not possible; write auto, true or false")
    return value


ExistingFile: TypeAlias = Annotated[Path, BeforeValidator(_existing_file)]
ExistingFolder: TypeAlias = Annotated[Path, BeforeValidator(_existing_folder)]
ExistingPath: TypeAlias = Annotated[Path, BeforeValidator(_existing_path)]
AutoOrPositive: TypeAlias = Annotated[int | Literal["auto"], PlainValidator(_auto_or_positive)]
AutoOrBoolean: TypeAlias = Annotated[bool | Literal["auto"], PlainValidator(_auto_or_boolean)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Fraction: TypeAlias = Annotated[float, Field(ge=0.0, lt=1.0)]
