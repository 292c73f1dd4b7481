"""`atoll dht`: a node of the DHT that stays where it is, for runs and peers to begin with."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.coordinator.cli.exits import ExitStatus
from atoll.coordinator.cli.options import InitialPeers
from atoll.protocol.addresses import parse_address

if TYPE_CHECKING:
    from atoll.protocol.hive import HivePlace


def command(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where other nodes reach this one.")] = "127.0.0.1:0",
    identity: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the node's key there, so that its address stays the same.")
    ] = None,
    initial_peers: InitialPeers = None,
) -> None:
    """Keeps a node of the DHT in which runs are found by their names, until it is interrupted.

    Runs come and go, and so do their coordinators' addresses; this is what they and their peers name with --initial-peers.
    """
    from atoll.coordinator.announcing import announcing_options, place_of

    options = announcing_options(listen, None, initial_peers or ())
    raise typer.Exit(asyncio.run(_keep(place_of(parse_address(listen, "--listen"), identity, options.initial))))


async def _keep(place: HivePlace) -> ExitStatus:
    from atoll.protocol.directory import Directory

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    directory = await Directory.open(place)
    try:
        print(directory.address, flush=True)
        await ended.wait()
    finally:
        await directory.close()
    return ExitStatus.FINISHED
