"""No connection of Atoll's own is in plain text by oversight."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PARTS = ("coordinator", "peer", "protocol")
OPENED = ("open_channel", "start_server")
WITHIN_ONE_PROCESS = {"peer/atoll/peer/measuring/handling.py"}
"""Measures what a message takes, over loopback, before there is a run."""


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Where channels and servers are opened."""
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
                if isinstance(node, ast.Call) and called in OPENED and name not in WITHIN_ONE_PROCESS:
                    yield name, node


def test_every_channel_and_server_says_how_it_is_protected() -> None:
    found = list(calls())
    assert len(found) >= 8, "the search finds nothing any more"
    for name, call in found:
        given = len(call.args) >= 2 or any(keyword.arg == "security" for keyword in call.keywords)
        if isinstance(call.func, ast.Name) and call.func.id == "start_server":
            given = any(keyword.arg == "security" for keyword in call.keywords)
        assert given, f"{name}:{call.lineno} does not say which security"


def test_grpc_is_opened_in_one_place() -> None:
    plain = ("insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port")
    places = {
        path.relative_to(ROOT).as_posix()
        for part in PARTS
        for path in (ROOT / part).rglob("*.py")
        if any(f".{word}(" in path.read_text(encoding="utf-8") for word in plain)
    }
    assert places == {"protocol/atoll/protocol/security.py"}
