"""Keeps torch's compiler out of a peer's process.

torch imports ``torch._dynamo``, and with it most of its compiler, when a function that the compiler must leave alone is first
called: many operators on the meta device, and every optimizer. A peer never compiles, and the import costs it 40 MB and half a
second of computing. So ``atoll-peer`` puts a module in its place that has the two functions which are asked of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


def leave_out_compiler() -> None:
    """To be called by a process that never compiles, before it uses torch; does nothing where the compiler is there already."""
    if COMPILER not in sys.modules:
        stand_in = ModuleType(COMPILER, "Stands for torch's compiler in a process that never compiles.")
        vars(stand_in).update(disable=_unchanged, graph_break=_nothing)
        sys.modules[COMPILER] = stand_in


def _unchanged(function: Callable[..., Any], recursive: bool = True, **_: object) -> Callable[..., Any]:
    """What ``torch._dynamo.disable`` comes to without a compiler."""
    return function


def _nothing() -> None:
    """What ``torch._dynamo.graph_break`` comes to without a compiler."""
