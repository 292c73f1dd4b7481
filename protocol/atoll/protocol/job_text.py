"""The text of a job: YAML into plain values, and ``--set section.key=value`` on top. Knows nothing of which keys exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from atoll.protocol.errors import JobError
from atoll.protocol.job_errors import show


class _Loader(yaml.SafeLoader):
    """Safe YAML where ``1e-3`` is a number, as everyone expects."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def parse_job_text(text: str, source: str) -> dict[str, Any]:
    """The mapping that ``text`` holds; ``source`` names it in errors. Raises JobError."""
    return parse_mapping(text, source, "a job", "has the keys model, data and training")


def parse_mapping(text: str, source: str, kind: str, expected: str) -> dict[str, Any]:
    """As :func:`parse_job_text` for a file of another ``kind``; ``expected`` says what it has. Raises JobError."""
    value = _parse(text, source)
    if not isinstance(value, dict):
        found = "empty" if value is None else f"not {kind} but {show(value)}"
        raise JobError("", f"{source} is {found}; {kind} {expected}")
    return value


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> None:
    """Put each ``section.key=value`` into ``values``; the value is read as YAML. Raises JobError."""
    for override in overrides:
        path, equals, text = override.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            raise JobError("", f"--set {override}: write it as section.key=value, for example --set training.steps=20")
        section = values
        for depth, name in enumerate(names[:-1]):
            inner = section.get(name)
            if inner is None:
                inner = section[name] = {}
            if not isinstance(inner, dict):
                raise JobError(
                    ".".join(names[: depth + 1]),
                    f"{show(inner)} is one value, so --set {path} has no place; set the whole of it",
                )
            section = inner
        section[names[-1]] = _parse(text, f"--set {override}")


def _parse(text: str, source: str) -> Any:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated_keys(node, (), set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise JobError("", f"{source}{where} is not YAML: {error.problem}; check the indentation and the quotes") from error
    except yaml.YAMLError as error:
        raise JobError("", f"{source} is not YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise JobError("", f"{source} is nested too deeply; see docs/job-file.md for what it may hold") from error
    except ValueError as error:  # a date or a number that there is none of
        raise JobError("", f"{source} holds a value that cannot be: {error}; put it in quotes if it is text") from error
    finally:
        if loader is not None:
            loader.dispose()


def _refuse_repeated_keys(node: yaml.Node, path: tuple[str, ...], seen_nodes: set[int]) -> None:
    """YAML itself lets the last of two equal keys win, which hides a mistake."""
    if id(node) in seen_nodes:
        return
    seen_nodes.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, path, seen_nodes)
    if not isinstance(node, yaml.MappingNode):
        return
    names: set[str] = set()
    for key, value in node.value:
        inner = (*path, str(key.value))
        if inner[-1] in names:
            raise JobError(
                ".".join(inner), f"this key is given twice, again at line {key.start_mark.line + 1}; keep one of them"
            )
        names.add(inner[-1])
        _refuse_repeated_keys(value, inner, seen_nodes)
