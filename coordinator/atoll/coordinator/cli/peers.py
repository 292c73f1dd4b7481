"""`atoll peers`: who takes part in a run; and who shall not any more, or again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.options import AsJson, ExistingState
from atoll.coordinator.cli.status import STATUS_SECONDS, as_dict, ask, ask_status, in_order, peer_lines
from atoll.protocol.v1.operator_pb2 import AllowPeerReply, AllowPeerRequest, RemovePeerReply, RemovePeerRequest

REMOVE, ALLOW = "remove", "allow"
HAND_OVER_SECONDS = 30.0


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[remove NAME | allow NAME] [HOST:PORT|DIR]",
            help="What to do, and the coordinator or the state folder. Default: list the peers of the newest run.",
        ),
    ] = None,
    state: ExistingState = None,
    hand_over_seconds: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="How long a peer that is removed may stay to hand its layers over.")
    ] = HAND_OVER_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Lists the peers of a run, what they hold and what they do; removes one by its name, or lets a removed one join again."""
    action, name, target = parse(words or [])
    if action == REMOVE:
        print(_remove(name, target, state, hand_over_seconds))
    elif action == ALLOW:
        print(_allow(name, target, state))
    else:
        _list(target, state, as_json=as_json)


def parse(words: list[str]) -> tuple[str, str, str | None]:
    """What to do, to whom, and at which coordinator. Raises UsageError."""
    action = words[0] if words and words[0] in (REMOVE, ALLOW) else ""
    rest = words[1:] if action else words
    if action and not rest:
        raise UsageError(f"give the name of the peer to {action}: atoll peers {action} NAME")
    name, rest = (rest[0], rest[1:]) if action else ("", rest)
    if len(rest) > 1:
        raise UsageError(f"one coordinator is asked at a time, not {' and '.join(rest)}")
    return action, name, rest[0] if rest else None


def _list(target: str | None, state: Path | None, *, as_json: bool) -> None:
    reply = ask_status(target, state)
    lines = [json.dumps({"event": "peer", **as_dict(peer)}) for peer in in_order(reply)] if as_json else peer_lines(reply)
    print("\n".join(lines or ["no peer has joined"] * (not as_json)))


def _remove(name: str, target: str | None, state: Path | None, hand_over_seconds: float) -> str:
    request = RemovePeerRequest(name=name, hand_over_seconds=hand_over_seconds)
    reply: RemovePeerReply = ask(target, state, lambda stub: stub.RemovePeer(request, timeout=STATUS_SECONDS))
    barred = f"nobody of that name may join until `atoll peers allow {name}`"
    if not reply.was_here:
        return f"no peer named {name} is here; {barred}"
    return f"{name} is being removed, within {hand_over_seconds:g} s; {barred}"


def _allow(name: str, target: str | None, state: Path | None) -> str:
    request = AllowPeerRequest(name=name)
    reply: AllowPeerReply = ask(target, state, lambda stub: stub.AllowPeer(request, timeout=STATUS_SECONDS))
    return f"{name} may join again" if reply.was_barred else f"{name} was not removed, it may join"
