"""Where a coordinator or a peer listens for browsers and scrapers: plain HTTP, of its own port."""

from __future__ import annotations

from aiohttp import web

from atoll.protocol.addresses import Address, parse_address
from atoll.protocol.errors import ResourceError

CLOSE_SECONDS = 1.0
"""For answers that are under way at the end."""


def parse_web_address(text: str, flag: str) -> tuple[str | None, int]:
    """``HOST:PORT``, or ``:PORT`` (host None) for all addresses; raises JobError that names the flag."""
    everywhere = text.startswith(":")
    address = parse_address(f"[::]{text}" if everywhere else text, flag)
    return None if everywhere else address.host, address.port


async def listen(app: web.Application, where: str, *, flag: str, what: str) -> tuple[web.AppRunner, str]:
    """Serves ``app`` until the runner that is returned is cleaned up; with the URL. Raises JobError for what is no address, and
    ResourceError, which says ``what`` cannot listen, when it cannot be had."""
    host, port = parse_web_address(where, flag)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ResourceError(f"{what} cannot listen on {where}: {error.strerror or error}; give another {flag}") from error
    listens = Address(*runner.addresses[0][:2])
    return runner, f"http://{Address('localhost', listens.port) if listens.is_unspecified else listens}/"
