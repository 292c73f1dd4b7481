"""Notices that this machine is about to be taken away: asks a URL every few seconds, as providers of spot instances have it.

Most providers answer 404 until there is a notice and 200 with some words then; Google's answers FALSE until it answers TRUE,
Azure's with a list of events that is empty. Amazon's wants a token first. An answer in any other way, or none, is no notice."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit, urlunsplit

from atoll.protocol.errors import JobError

POLL_SECONDS = 2.0  # the shortest warning that providers give is 30 s
ANSWER_SECONDS = 1.0  # they are near; for each piece of an answer
WHOLE_SECONDS = 2.0  # for all of it; a peer that ends waits for an answer that long
MOST_BYTES = 64 * 1024
TOKEN_PATH = "/latest/api/token"
TOKEN_SECONDS = "300"
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
NOTHING_YET = frozenset({"", "false", "none", "null", "no", "0"})

_log = logging.getLogger("atoll.peer")


def notice_url_of_flag(text: str) -> str:
    """The URL of ``--notice-url``; raises JobError for anything but http and https."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise JobError("--notice-url", f"{text!r} is no URL; write for example http://169.254.169.254/...")
    return text


def is_notice(status: int, body: str) -> bool:
    """Whether an answer says that the machine will be taken away."""
    if status != 200:
        return False
    text = body.strip()
    try:
        value = json.loads(text)
    except ValueError:
        return text.lower() not in NOTHING_YET
    if isinstance(value, dict):
        events = value.get("Events")
        return bool(events) if isinstance(events, list) else bool(value)
    return bool(value) and str(value).strip().lower() not in NOTHING_YET


async def watch_for_notice(url: str, on_notice: Callable[[str], None], poll_seconds: float = POLL_SECONDS) -> None:
    """Asks until there is a notice, then calls ``on_notice`` with a reason and returns. A failure is told once, and asking goes
    on."""
    told = False
    while True:
        try:
            status, body = await asyncio.to_thread(_ask, url)
        except (OSError, ValueError) as error:
            if not told:
                told = True
                _log.warning("%s cannot be asked for notices (%s); asking goes on", url, error)
        else:
            if is_notice(status, body):
                on_notice("this machine is about to be taken away")
                return
        await asyncio.sleep(poll_seconds)


def _ask(url: str) -> tuple[int, str]:
    """Status and body, within a few seconds. Raises OSError."""
    status, body = _get(url, HEADERS)
    if status != 401:
        return status, body
    parts = urlsplit(url)
    token_url = urlunsplit((parts.scheme, parts.netloc, TOKEN_PATH, "", ""))
    status, token = _open("PUT", token_url, {"X-aws-ec2-metadata-token-ttl-seconds": TOKEN_SECONDS})
    return _get(url, {**HEADERS, "X-aws-ec2-metadata-token": token.strip()}) if status == 200 else (status, "")


def _get(url: str, headers: dict[str, str]) -> tuple[int, str]:
    return _open("GET", url, headers)


def _open(method: str, url: str, headers: dict[str, str]) -> tuple[int, str]:
    """One request, of the machine's own provider, never through a proxy. An answer that trickles in is cut off: the time-out of
    a socket begins anew with each byte."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
    try:
        connection.connect()
        with _ended_after(connection.sock, WHOLE_SECONDS):
            connection.request(method, urlunsplit(("", "", parts.path or "/", parts.query, "")), headers=headers)
            answer = connection.getresponse()
            body = answer.read(MOST_BYTES)
        return answer.status, body.decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"no answer in HTTP: {error!r}") from error
    finally:
        connection.close()


@contextlib.contextmanager
def _ended_after(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Whoever reads from the socket meets its end when the time is over. Raises TimeoutError then."""
    over = threading.Event()

    def end() -> None:
        over.set()
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if over.is_set():
        raise TimeoutError(f"the answer was not there within {seconds:g} s")
