"""From pydantic's errors to one sentence for a person: the field's path, the value found, the fix.

Owns the wording only; what is right and wrong is said by the models in ``job``.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from atoll.protocol.errors import JobError

ModelType: TypeAlias = type[BaseModel]

_LONGEST_VALUE = 60
_NOT_A = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a group of keys",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "is too small; write at least {}"),
    "greater_than": ("gt", "is too small; write more than {}"),
    "less_than_equal": ("le", "is too large; write at most {}"),
    "less_than": ("lt", "is too large; write less than {}"),
}


class WrongValue(ValueError):
    """Raised by a model's own validators: ``field`` is the path below that model, ``message`` the rest of the sentence."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def show(value: object) -> str:
    """``value`` as one would write it in a job file, shortened."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, str):
        text = repr(value)
    else:
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def listed(choices: Sequence[str], word: str = "or") -> str:
    """``a, b or c``."""
    return " ".join([", ".join(choices[:-1]), word, choices[-1]]) if len(choices) > 1 else "".join(choices)


def suggestion(wrong: str, choices: Sequence[str]) -> str:
    """The closest of ``choices`` as a question, or all of them."""
    close = difflib.get_close_matches(wrong, choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"choose {listed([repr(choice) for choice in choices])}"


def job_error(error: ValidationError, model: ModelType) -> JobError:
    """The error that helps most, as one sentence: an unknown key first, for it is often why another one is missing."""
    wrong = wrong_value(error, model)
    return JobError(wrong.field, wrong.message)


def wrong_value(error: ValidationError, model: ModelType) -> WrongValue:
    """As :func:`job_error`, with the path relative to ``model``; for validators that validate a part themselves."""
    details = sorted(error.errors(), key=lambda one: one["type"] not in ("invalid_key", "extra_forbidden"))[0]
    path = tuple(str(part) for part in details["loc"])
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, WrongValue):
        return WrongValue(".".join((*path, *filter(None, (cause.field,)))), cause.message)
    return WrongValue(".".join(path), _sentence(details, path, model))


def _sentence(details: ErrorDetails, path: tuple[str, ...], model: ModelType) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, value, model)
    if kind == "invalid_key":
        return f"{show(value)} is not a key; keys are words"
    if kind == "missing" and path[-1].isdigit():
        return f"{show(value)} has too few items; write all of them{_example(path[:-1], model)}"
    if kind == "missing":
        return f"this key is missing; add it{_example(path, model)}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        return f"{show(value)} is not known; {suggestion(str(value), choices)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{show(value)} {words.format(context[name])}"
    if kind == "too_long":
        return f"{show(value)} has too many items; write {context['max_length']}{_example(path, model)}"
    if kind == "finite_number":
        return f"{show(value)} is not a finite number; write one{_example(path, model)}"
    if kind == "value_error":
        return str(context["error"])
    section = model_at(path, model)
    if section is not None:
        return f"{show(value)} is not a group of keys; write {listed(list(section.model_fields), 'and')} below it"
    expected = _NOT_A.get(kind.split("_")[0], "what belongs here")
    return f"{show(value)} is not {expected}; write {expected}{_example(path, model)}"


def _unknown_key(path: tuple[str, ...], value: object, model: ModelType) -> str:
    *parents, wrong = path
    owner = model_at(tuple(parents), model)
    known = [field.alias or name for name, field in owner.model_fields.items()] if owner is not None else []
    found = f"unknown key (value {show(value)})"
    elsewhere = [other for other in key_paths(model) if other.rpartition(".")[2] == wrong]
    if elsewhere:
        return f"{found}; it belongs at {listed(elsewhere)}"
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    if close:
        return f"{found}; did you mean {close[0]!r}?"
    return f"{found}; the keys here are {listed(known, 'and')}"


def _example(path: tuple[str, ...], model: ModelType) -> str:
    field = _field_at(path, model)
    if field is None or not field.examples:
        return ""
    example = field.examples[0]
    return f", for example `{path[-1]}: {example if isinstance(example, str) else show(example)}`"


def _field_at(path: tuple[str, ...], model: ModelType) -> FieldInfo | None:
    owner = model_at(path[:-1], model)
    return owner.model_fields.get(path[-1]) if owner is not None and path else None


def model_at(path: tuple[str, ...], model: ModelType) -> ModelType | None:
    """The model that describes the section at ``path``, or None when there is none."""
    for name in path:
        if name.isdigit():  # an item of a list, whose kind the list's field says
            continue
        field = model.model_fields.get(name)
        inner = next(_models_in(field.annotation), None) if field is not None else None
        if inner is None:
            return None
        model = inner
    return model


def key_paths(model: ModelType, prefix: str = "") -> Iterator[str]:
    """The dotted path of every key that a job may have."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            yield from key_paths(inner, f"{prefix}{name}.")


def _models_in(annotation: Any) -> Iterator[ModelType]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
