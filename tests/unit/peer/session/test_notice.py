"""Notices of providers: which answers are one, and asking for them over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from atoll.peer.session import notice
from atoll.peer.session.notice import is_notice, notice_url_of_flag, watch_for_notice
from atoll.protocol.errors import JobError
from support.waiting import assert_eventually


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, "", False),
        (200, '{"action": "terminate", "time": "2030-01-01T00:00:00Z"}', True),
        (200, "FALSE\n", False),
        (200, "TRUE", True),
        (200, '{"DocumentIncarnation": 1, "Events": []}', False),
        (200, '{"DocumentIncarnation": 2, "Events": [{"EventType": "Preempt"}]}', True),
        (200, "", False),
        (200, "[]", False),
        (200, '"none"', False),
        (500, "TRUE", False),
    ],
)
def test_what_is_a_notice(status: int, body: str, expected: bool) -> None:
    assert is_notice(status, body) is expected


def test_only_urls_that_can_be_asked_are_taken() -> None:
    assert notice_url_of_flag("http://169.254.169.254/x")
    for text in ("file:///etc/passwd", "nonsense", "http://"):
        with pytest.raises(JobError, match="--notice-url"):
            notice_url_of_flag(text)


@asynccontextmanager
async def served(answer: Callable[[str, str], tuple[int, str]]) -> AsyncIterator[str]:
    """An HTTP server that answers each method and head so; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, body = answer(head.split(" ", 1)[0], head)
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/notice"


async def test_a_notice_is_seen_once_it_is_there_and_failures_before_are_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    asked = 0

    def answer(method: str, head: str) -> tuple[int, str]:
        nonlocal asked
        asked += 1
        return (500, "TRUE") if asked == 1 else (404, "") if asked == 2 else (200, '{"action": "stop"}')

    found: list[str] = []
    async with served(answer) as url:
        await asyncio.wait_for(watch_for_notice(url, found.append, poll_seconds=0.01), 20.0)
    assert found == ["this machine is about to be taken away"]
    assert asked == 3


async def test_a_provider_that_wants_a_token_gets_one() -> None:
    def answer(method: str, head: str) -> tuple[int, str]:
        if method == "PUT":
            return (200, "secret") if "/latest/api/token" in head else (404, "")
        return (200, '{"action": "stop"}') if "X-aws-ec2-metadata-token: secret".lower() in head.lower() else (401, "")

    found: list[str] = []
    async with served(answer) as url:
        await asyncio.wait_for(watch_for_notice(url, found.append, poll_seconds=0.01), 20.0)
    assert found


async def test_a_url_that_nobody_answers_is_told_once_and_asked_on(caplog: pytest.LogCaptureFixture) -> None:
    task = asyncio.create_task(watch_for_notice("http://127.0.0.1:1/x", lambda reason: None, poll_seconds=0.01))
    await assert_eventually(lambda: bool(caplog.records), within_seconds=20.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len([record for record in caplog.records if "cannot be asked for notices" in record.message]) == 1


async def test_an_answer_that_trickles_in_is_cut_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(notice, "WHOLE_SECONDS", 0.2)

    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n")
        with contextlib.suppress(OSError):
            while not writer.is_closing():  # each byte is there long before the time-out of the socket
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/notice"
        task = asyncio.create_task(watch_for_notice(url, lambda reason: None, poll_seconds=30.0))
        await assert_eventually(lambda: "was not there within 0.2 s" in caplog.text, within_seconds=20.0)
        await asyncio.wait_for(served.wait(), 20.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
