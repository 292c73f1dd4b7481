"""The two ends of one link, each a process on its host; started by ``link.py``.

``receive`` listens, for Atoll's link and for a plain TCP stream, and says where in one line of JSON; it ends with its standard
input. ``send`` transfers to it over both in turns, and prints the seconds of every transfer as JSON. With an identity there is
a link over TLS as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from atoll.coordinator.identity.authority import Authority
from atoll.peer.links.links import Links, LinkSettings
from atoll.protocol.assignment import Neighbour
from atoll.protocol.certificates import certificate_pem, key_pem, new_key
from atoll.protocol.channel import start_server
from atoll.protocol.errors import LinkError
from atoll.protocol.identity import Role, Verifier
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageKey
from atoll.protocol.security import Credentials, MutualTls, PlainText, Security

SENDER, RECEIVER = PeerId("sender"), PeerId("receiver")
GENERATION = Generation(1)
CONNECT_SECONDS = 60.0
ACCOUNT_BYTES = 8
PIECE_BYTES = 256 * 1024

Transfer = Callable[[int], Awaitable[None]]
"""Returns when the other end has said that all of it is there."""


def failed(error: LinkError) -> None:
    """Nothing goes on after a fault."""
    print(f"link_ends: {error}", file=sys.stderr, flush=True)
    sys.exit(1)


def links_of(own: PeerId, security: Security) -> Links:
    """What arrives is consumed at once."""
    links = Links(own, on_message=lambda peer, message: links.consumed(message.key, peer), on_fault=failed, security=security)
    return links


def securities_of(own: PeerId, identity: str | None) -> dict[str, Security]:
    """By what a link so protected is called: plain text, also between hosts, and TLS with the authority in that folder."""
    plain = PlainText(anywhere=True)
    return {"link": plain} if identity is None else {"plain": plain, "link": tls_of(own, identity)}


def tls_of(own: PeerId, identity: str) -> Security:
    authority = Authority.existing(Path(identity))
    key, now, day = new_key(), datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = authority.issue(Role.PEER, own, key.public_key(), now, day)
    shown = Credentials(
        key=key_pem(key), certificate=certificate_pem(certificate), authority=certificate_pem(authority.certificate)
    )
    return MutualTls(shown, Verifier(authority.certificate))


async def configure(links: Links, other: PeerId, address: str, *, dial: bool) -> None:
    """Returns when the link is up."""
    await links.configure(
        generation=GENERATION,
        neighbours=[Neighbour(stage=StageIndex(int(dial)), peer=other, address=address, dial=dial)],
        settings=LinkSettings(connect_seconds=CONNECT_SECONDS),
        accept=lambda peer, header: None,
    )


async def receive(host: str, identity: str | None) -> None:
    links, servers, where = [], [], {}
    for name, security in securities_of(RECEIVER, identity).items():
        links.append(links_of(RECEIVER, security))
        server, where[name] = await start_server([links[-1].register], f"{host}:0", security=security)
        servers.append(server)
    tcp_server = await asyncio.start_server(swallow, host, 0, limit=2**22)
    where["tcp"] = f"{host}:{tcp_server.sockets[0].getsockname()[1]}"
    print(json.dumps(where), flush=True)
    await asyncio.gather(*(configure(each, SENDER, "", dial=False) for each in links))
    await asyncio.to_thread(sys.stdin.read)
    tcp_server.close()
    for each, server in zip(links, servers, strict=True):
        await each.close()
        await server.stop(0)


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with a byte whenever as many bytes have arrived as were announced."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            left = int.from_bytes(await reader.readexactly(ACCOUNT_BYTES), "little")
            while left:
                piece = await reader.read(min(left, PIECE_BYTES))
                if not piece:
                    return
                left -= len(piece)
            writer.write(b"!")
            await writer.drain()


async def send(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    links = {name: links_of(SENDER, security) for name, security in securities_of(SENDER, options.identity).items()}
    for name, each in links.items():
        await configure(each, RECEIVER, getattr(options, name), dial=True)
    host, _, port = options.tcp.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**22)
    over: dict[str, Transfer] = {
        **{name: Messages(each, options.message_bytes).transfer for name, each in links.items()},
        "tcp": lambda num_bytes: over_tcp(reader, writer, num_bytes),
    }
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in over}
    for turn in range(options.rounds):
        for name in list(over) if turn % 2 == 0 else reversed(list(over)):
            measured[name].append(await one_round(over[name], options))
    writer.close()
    for each in links.values():
        await each.close()
    return measured


async def one_round(transfer: Transfer, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a long transfer and of short ones, each right after another transfer and after a pause."""
    found: dict[str, Any] = {}
    await timed(transfer, options.bytes)
    for size, num_bytes in (("long", options.bytes), ("short", options.short_bytes)):
        found[f"{size}, busy"] = await timed(transfer, num_bytes)
        await asyncio.sleep(options.idle_seconds)
        found[f"{size}, idle"] = await timed(transfer, num_bytes)
    return found


async def timed(transfer: Transfer, num_bytes: int) -> float:
    began = time.perf_counter()
    await transfer(num_bytes)
    return time.perf_counter() - began


class Messages:
    """Transfers as raw activations, all handed over at once."""

    def __init__(self, links: Links, message_bytes: int) -> None:
        self._links = links
        self._tensor = torch.rand(message_bytes // 4)
        self._count = 0

    async def transfer(self, num_bytes: int) -> None:
        sent = []
        for _ in range(num_bytes // self._tensor.nbytes):
            self._count += 1
            key = MessageKey(
                generation=GENERATION,
                step=StepNumber(1),
                microbatch=MicrobatchIndex(self._count),
                kind=Kind.ACTIVATION,
                source=StageIndex(0),
                target=StageIndex(1),
            )
            sent.append(asyncio.wrap_future(self._links.send(RECEIVER, Message(key=key, tensors=(("x", self._tensor),)))))
        await asyncio.gather(*sent)


async def over_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int) -> None:
    writer.write(num_bytes.to_bytes(ACCOUNT_BYTES, "little"))
    piece = bytes(PIECE_BYTES)
    for begin in range(0, num_bytes, PIECE_BYTES):
        writer.write(piece[: num_bytes - begin])
        await writer.drain()
    await reader.readexactly(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["receive", "send"])
    parser.add_argument("--host", required=True, help="this host's own address")
    parser.add_argument("--link", help="where the receiving end's link listens")
    parser.add_argument("--plain", help="where the one in plain text listens, if the other is over TLS")
    parser.add_argument("--tcp", help="where its plain TCP stream listens")
    parser.add_argument("--identity", help="the folder of an authority, for TLS")
    for number in ("bytes", "short-bytes", "message-bytes", "rounds"):
        parser.add_argument(f"--{number}", type=int)
    parser.add_argument("--idle-seconds", type=float)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.role == "receive":
        asyncio.run(receive(options.host, options.identity))
    else:
        print(json.dumps(asyncio.run(send(options))), flush=True)


if __name__ == "__main__":
    main()
