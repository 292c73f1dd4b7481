"""gRPC channels and servers with one set of options, each with its reason; addresses; ports.

gRPC's limit on a message's size stays as it is (4 MB): bulk data travels in chunks far below it (``framing``). So do the
windows of HTTP/2 and the size of its frames: gRPC finds out how much is under way between two ends and lets that be sent.
Measured at 100 ms and 100 Mbps, right after other traffic and after five idle seconds, one link then carries what a plain TCP
stream carries (``benchmarks/link.py``). So there is nothing to gain by several connections, nor by larger windows, which would
take memory wherever a receiver is slow.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence

import grpc.aio

from atoll.protocol.addresses import Address as Address
from atoll.protocol.addresses import parse_address as parse_address
from atoll.protocol.errors import ResourceError
from atoll.protocol.ids import COORDINATOR, PeerId
from atoll.protocol.security import PlainText, Security

PROTOCOL_VERSION = 3
"""Grows when an older process could misread a newer one's messages. Both sides compare it when they meet."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    # A neighbour whose machine vanished sends no FIN; pings find out. 10 s + 10 s is below every lease and deadline of a run,
    # and below the idle limit of common NAT routers (30 s and more).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A stream may be idle between steps, and pings must go on then.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The receiving side of the same pings must not answer "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Peers and coordinator are addressed directly; an http_proxy meant for the web would break that silently.
    ("grpc.enable_http_proxy", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_OPTIONS,
    # Neighbours start at different moments: try again soon, and do not let the pause grow beyond what a deadline can bear.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Two peers in one process (tests) must not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Who connects must come through TLS soon; the default is two minutes. A slow machine far away takes one or two seconds.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Who has nothing to say is let go, and connects again when it has. Sessions and links are calls, and last.
    ("grpc.max_connection_idle_ms", 60_000),
    # A peer has one session, one link to each other and a few transfers; the guard counts over all connections of a caller.
    ("grpc.max_concurrent_streams", 128),
    # With SO_REUSEPORT two daemons would share a port and each see half of the connections.
    ("grpc.so_reuseport", 0),
)


def open_channel(address: str, security: Security | None = None, to: PeerId = COORDINATOR) -> grpc.aio.Channel:
    """A channel to ``to`` at ``HOST:PORT``; nothing is dialled before the first call. Without ``security`` in plain text.
    Raises IdentityRefused when that must not be."""
    return (security or PlainText()).channel(parse_address(address), to, CHANNEL_OPTIONS)


async def start_server(
    servicers: Sequence[Callable[[grpc.aio.Server], None]],
    listen: str,
    field: str = "--listen",
    security: Security | None = None,
) -> tuple[grpc.aio.Server, str]:
    """A started server and the address it is bound to (with the real port where ``listen`` says 0).

    Each of ``servicers`` registers one service, for example ``partial(add_LinksServicer_to_server, servicer)``. Raises
    ResourceError when the address cannot be bound; the sentence names the port and ``field``, the flag to change. Without
    ``security`` it speaks plain text; raises IdentityRefused when that must not be.
    """
    security = security or PlainText()
    address = parse_address(listen, field)
    if address.port != 0:
        _check_free(address, field)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[security.guard])
    for register in servicers:
        register(server)
    try:
        port = security.listen(server, address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ResourceError(f"cannot listen on {address}: choose an address of this machine with {field} HOST:PORT")
    await server.start()
    return server, str(Address(address.host, port))


def _check_free(address: Address, field: str) -> None:
    """Binds and releases the port, because gRPC's own error does not say what is wrong."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except socket.gaierror as error:
        raise ResourceError(f"cannot listen on {address}: the host name is unknown ({error.strerror}); see {field}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(
                f"cannot listen on {address}: port {address.port} is in use{_holder(address.port)}; "
                f"stop that process or choose another port with {field} HOST:PORT (port 0 picks a free one)"
            ) from error
        raise ResourceError(
            f"cannot listen on {address}: {error.strerror}; choose an address of this machine with {field} HOST:PORT"
        ) from error


def _holder(port: int) -> str:
    """`` by NAME (pid N)`` where the system lets us see it, else nothing."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            holds = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if holds and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""
