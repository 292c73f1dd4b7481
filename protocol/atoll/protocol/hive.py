"""hivemind's P2P in this process: it starts its daemon, and leaves nothing behind.

hivemind talks over libp2p, which is a program of its own, ``p2pd``: it holds the connections to others (encrypted, each end
shown by its key), and hands streams to this process over Unix sockets. :class:`Hive` owns one such daemon. What it makes
sure of:

- hivemind is imported and its daemon started when first needed: the import takes a second and 60 MiB, the daemon 40 MiB. On a
  busy machine the import takes ten times as long, so it is done beside the event loop.
- Under load a start fails now and then (the daemon says that it is ready before its socket is, or says it too late). It is
  tried again, a few times.
- The daemon is in a session of its own, so that an interrupt from the terminal does not end it before the step in progress.
- Its sockets lie in a folder that nobody else may enter, held by a lock. :meth:`Hive.close` ends the daemon and removes the
  folder. If this process is killed the daemon ends by itself, as its connection to this process breaks; the folder is
  removed by the next process that starts a hive, as nobody holds its lock.

No process is forked: hivemind's own ``DHT`` and ``DecentralizedAverager`` do that, which in a process with gRPC's threads
hangs; the classes below them (``P2P``, ``DHTNode``, ``AllReduceRunner``) live on an event loop, and these alone are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import importlib.util
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.protocol.errors import ResourceError

if TYPE_CHECKING:
    from hivemind.p2p import P2P

_logger = logging.getLogger(__name__)

_FOLDER_PREFIX = "atoll-hive-"
_LOCK_NAME = "lock"
_MAX_STARTS = 4
_START_SECONDS = 20.0
"""For one start. It takes 0.3 seconds on an idle machine."""
_STOP_SECONDS = 5.0
_CONNECT_SECONDS = 5.0
_YIELD_SECONDS = 3.0
"""How long the second of two waits for the first to dial."""
_PAUSE_SECONDS = 0.2
_LOOK_SECONDS = 0.02
_IN_OWN_SESSION = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class HivePlace:
    """Where the daemon listens: an IP address and a port of this machine, 0 for any; ``advertised`` is the host name or
    address by which others reach it, where that is another. Its identity is kept in the file ``identity``, if one is named.

    One that ``finds`` others by their identities alone, as a DHT needs it, begins with those at ``initial``.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertised: str = ""
    identity: Path | None = None
    finds: bool = False
    initial: tuple[str, ...] = ()


def hivemind_is_here() -> bool:
    """Whether the package is installed; imports nothing."""
    return importlib.util.find_spec("hivemind") is not None


def import_hivemind(module: str) -> None:
    """Imports a module that needs hivemind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its layers for mixtures of experts use torch.jit.script
        importlib.import_module(module)


def require_hivemind(purpose: str) -> None:
    """Raises ResourceError, with what to do, where the package is missing."""
    if not hivemind_is_here():
        raise ResourceError(
            f"{purpose} needs the package hivemind, which is not installed here: `pip install 'hivemind>=1.1.12,<1.2'` "
            f"(there are wheels for Linux and macOS); all else works without it"
        )


class Hive:
    """One daemon and the connection to it. Made by :meth:`start`; belongs to the event loop that runs it."""

    def __init__(self, p2p: P2P, folder: _Folder, address: str) -> None:
        self.p2p = p2p
        self._folder = folder
        self.address = address
        """What others :meth:`connect` to: a multiaddress that ends in this daemon's identity."""

    @classmethod
    async def start(cls, place: HivePlace, purpose: str = "averaging with hivemind") -> Hive:
        """Raises ResourceError where hivemind is missing, or its daemon does not start."""
        require_hivemind(purpose)
        await asyncio.to_thread(import_hivemind, "hivemind.p2p")
        _remove_abandoned()
        folder = _Folder()
        try:
            p2p = await _started(folder.path, place)
            return cls(p2p, folder, _address(await p2p.get_visible_maddrs(), place))
        except BaseException:
            folder.remove()
            raise

    @property
    def pid(self) -> int:
        """The daemon's process."""
        return int(self.p2p._child.pid)

    @property
    def folder(self) -> Path:
        """Where its sockets are."""
        return self._folder.path

    @property
    def is_running(self) -> bool:
        """Whether the daemon has not ended."""
        return self.p2p._child.returncode is None

    async def connect(self, address: str, deadline_seconds: float, *, first: bool = True) -> None:
        """Returns when this daemon is connected to that at ``address``, whichever of them dialled; raises TimeoutError.

        Of two that are to be connected one must be ``first``, the other dials only if nothing comes: seen once, two
        that dialled at the same time over a slow link stayed apart for half a minute; why was not examined.
        """
        from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

        peer, target = _parsed(address)
        loop = asyncio.get_running_loop()
        dial_at = loop.time() + (0.0 if first else _YIELD_SECONDS)
        async with asyncio.timeout(deadline_seconds):
            while not any(known.peer_id == peer for known in await self.p2p.list_peers()):
                if loop.time() >= dial_at:
                    with contextlib.suppress(ControlFailure, OSError, TimeoutError):
                        async with asyncio.timeout(_CONNECT_SECONDS):
                            await self.p2p._client.connect(peer, [target])
                    dial_at = loop.time() + _PAUSE_SECONDS * (1.0 + random.random())
                await asyncio.sleep(_LOOK_SECONDS)

    async def close(self) -> None:
        """Ends the daemon and removes its sockets. May be called again."""
        child = self.p2p._child
        self.p2p._terminate()
        try:
            await asyncio.wait_for(child.wait(), _STOP_SECONDS)
        except TimeoutError:
            _logger.warning("hivemind's daemon (process %d) did not end when asked to; it is killed", child.pid)
            child.kill()
            await child.wait()
        finally:
            self._folder.remove()


def identity_of(address: str) -> str:
    """The identity at the end of a multiaddress, as libp2p writes it; raises ValueError."""
    _, marker, identity = address.rpartition("/p2p/")
    if not marker or not identity:
        raise ValueError(f"{address!r} is no address of a hive: it must look like /ip4/192.0.2.7/tcp/31337/p2p/12D3Koo...")
    return identity


def numeric(host: str) -> str:
    """An address that libp2p can listen on, for it takes no names."""
    return str(socket.getaddrinfo(host, None)[0][4][0])


class _Folder:
    """A folder with a lock that is held until :meth:`remove`, or until this process ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        unlocked = self.path / "unlocked"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)  # not inherited, so the daemon does not hold it
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK_NAME)  # nobody ever sees it unheld

    def remove(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned() -> None:
    """Removes the folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, held by its owner, not locked yet, or gone
            lock = os.open(path / _LOCK_NAME, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


async def _started(folder: Path, place: HivePlace) -> P2P:
    """A daemon whose sockets are in ``folder``, and the connection to it."""
    kind = _kind(folder)
    for attempt in range(1, _MAX_STARTS + 1):
        try:
            return await asyncio.wait_for(_create(kind, place), _START_SECONDS)
        except Exception as error:  # whatever it is: an event loop's, a socket's, hivemind's own
            fault = f"{type(error).__name__}: {error}"
            _logger.info("start %d of hivemind's daemon failed: %s", attempt, fault)
        await asyncio.sleep(_PAUSE_SECONDS * attempt)
    hint = f"; can {', '.join(place.initial)} be reached?" if place.initial else ""
    raise ResourceError(f"hivemind's daemon did not start in {_MAX_STARTS} attempts; the last one: {fault}{hint}")


async def _create(kind: Any, place: HivePlace) -> P2P:
    listening = f"/{_family(place.host)}/{place.host}/tcp/{place.port}"
    created: P2P = await kind.create(
        host_maddrs=[listening],
        announce_maddrs=[_reached(place, place.port)] if place.advertised and place.port else None,
        initial_peers=list(place.initial) or None,
        identity_path=None if place.identity is None else str(place.identity),
        check_if_identity_free=False,  # whoever was killed a moment ago had it
        dht_mode="server" if place.finds else "client",
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        conn_manager=False,
        startup_timeout=_START_SECONDS,
        idle_timeout=_START_SECONDS,  # what is left of a start that failed ends after this time
    )
    return created


def _kind(folder: Path) -> Any:
    """hivemind's P2P, but for where its sockets are and the session that its daemon is in."""
    from hivemind.p2p import P2P
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")  # its records go where ours go

    class OwnP2P(P2P):  # type: ignore[misc]
        _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

        @staticmethod
        def _make_process_args(*args: object, **kwargs: object) -> Sequence[str]:
            return [sys.executable, "-ISc", _IN_OWN_SESSION, *P2P._make_process_args(*args, **kwargs)]

    return OwnP2P


def _family(host: str) -> str:
    return "ip6" if ":" in host else "ip4"


def _address(visible: Sequence[Any], place: HivePlace) -> str:
    """The address to tell others: the daemon's port and identity, on the host that is advertised."""
    return f"{_reached(place, int(visible[0]['tcp']))}/p2p/{visible[0]['p2p']}"


def _reached(place: HivePlace, port: int) -> str:
    host = place.advertised or place.host
    kind = _family(host) if ":" in host or host.replace(".", "").isdigit() else "dns"
    return f"/{kind}/{host}/tcp/{port}"


def _parsed(address: str) -> tuple[Any, Any]:
    """A multiaddress's identity, and the rest."""
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    identity = identity_of(address)
    return PeerID.from_base58(identity), Multiaddr(address.rpartition("/p2p/")[0])
