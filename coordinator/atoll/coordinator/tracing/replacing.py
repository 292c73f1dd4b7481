"""Other functions in a library's module for a while: where it decides by itself what only we can know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def replaced(target: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Sets ``attributes`` of ``target`` inside the block; those that this version of the library lacks are left alone."""
    before = {name: getattr(target, name) for name in attributes if hasattr(target, name)}
    try:
        for name in before:
            setattr(target, name, attributes[name])
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
