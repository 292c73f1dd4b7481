"""A peer that shows its numbers to Prometheus while it trains."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time

import pytest
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from atoll.peer.daemon import Peer
from atoll.peer.session.values import ExitCode
from atoll.peer.settings import PeerSettings
from atoll.protocol.addresses import parse_address
from support.hand_models import transformer
from support.hand_run import HandRun, RunSettings, samples_of, swarm


async def numbers_at(url: str) -> dict[tuple[str, ...], float]:
    async with ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = await answer.text()
    families = text_string_to_metric_families(text)
    return {(sample.name, *sorted(sample.labels.values())): sample.value for family in families for sample in family.samples}


async def test_numbers_of_a_peer_that_trains(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atoll.peer")
    model = transformer()
    steps = samples_of(model)
    began = time.monotonic()
    async with swarm("ann", "bob", metrics="127.0.0.1:0") as peers:
        run = HandRun(peers.coordinator, await peers.seats(), model.graph, RunSettings())
        urls = re.findall(r"this peer's numbers are at (\S+)", caplog.text)
        await run.load(model.cuts[2:3])
        await run.step(1, steps[0])
        await run.step(2, steps[1])
        await run.evaluate(2, steps[2])
        for url in urls:
            check_numbers(await numbers_at(url), time.monotonic() - began)
        run.start(3, steps[2])
        await run.void(3)
        assert (await numbers_at(urls[0]))["atoll_own_void_steps_total",] == 1.0
    assert len(urls) == 2


def check_numbers(found: dict[tuple[str, ...], float], passed_seconds: float) -> None:
    """They are those of a peer that did two steps and an evaluation with its one neighbour."""
    own, other = ("ann", "bob") if any(key[:2] == ("atoll_own_info", "ann") for key in found) else ("bob", "ann")
    assert found["atoll_own_stage",] == float(own == "bob")
    assert (found["atoll_own_steps_total",], found["atoll_own_evaluations_total",]) == (2.0, 1.0)
    assert found["atoll_own_received_bytes_total", other] > 0.0
    assert found["atoll_own_link_bytes_total", other, "forward" if own == "ann" else "backward"] > 0.0
    parts = {key[1]: value for key, value in found.items() if key[0] == "atoll_own_seconds_total"}
    assert parts["forward"] > 0.0
    assert parts["backward"] > 0.0
    assert sum(parts.values()) <= passed_seconds
    assert 0.0 <= found["atoll_own_lease_age_seconds",] <= passed_seconds


async def test_a_port_for_numbers_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        metrics = f"127.0.0.1:{taken.getsockname()[1]}"
        nobody = parse_address("127.0.0.1:1")
        settings = PeerSettings(coordinator=nobody, name="ann", threads=1, insecure=True, metrics=metrics)
        outcome = await asyncio.wait_for(Peer(settings).run(), 60)
    assert outcome.exit_code == ExitCode.FAILED
    assert "give another --metrics" in outcome.reason
