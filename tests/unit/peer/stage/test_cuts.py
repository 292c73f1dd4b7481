"""What a fault plan cuts carries neither probes nor state, on either side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atoll.peer.measuring.probing import answer_probe
from atoll.peer.state.transfer import fetch_state
from atoll.protocol.channel import start_server
from atoll.protocol.chaos import parse_chaos
from atoll.protocol.fault_points import Armed, FaultPoints
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.probe_server import ProbesServicer
from atoll.protocol.v1 import session_pb2

ANN, BOB = PeerId("ann"), PeerId("bob")


def cut(folder: Path, process: PeerId, other: str) -> FaultPoints:
    """The process has been cut off that other one for a minute, since its start."""
    folder.mkdir(exist_ok=True)
    plan = parse_chaos({"faults": [{"fault": "cut", "peer": process, "from": other, "at": "0s", "seconds": "60s"}]})
    return FaultPoints(Armed(process=process, fired=folder, faults=dict(enumerate(plan.faults))))


async def probe(address: str, chaos: FaultPoints | None = None) -> session_pb2.Probed:
    request = session_pb2.Probe(number=7, peer=BOB, address=address, limit_seconds=2.0, latency_only=True)
    return await asyncio.wait_for(answer_probe(request, own=ANN, coordinator="127.0.0.1:1", chaos=chaos), 30.0)


async def test_a_probe_over_a_cut_finds_nobody_whichever_end_is_cut_off(tmp_path: Path) -> None:
    async def served(chaos: FaultPoints | None) -> tuple[Any, str]:
        return await start_server([ProbesServicer(BOB, chaos=chaos).register], "127.0.0.1:0")

    whole, address = await served(None)
    torn, other = await served(cut(tmp_path / "bob", BOB, ANN))
    try:
        assert not (await probe(address)).failure
        assert (await probe(address, cut(tmp_path / "ann", ANN, BOB))).failure == "bob did not answer within 2 s"
        assert (await probe(other)).failure
    finally:
        await whole.stop(None)
        await torn.stop(None)


async def test_state_is_not_fetched_from_a_coordinator_that_is_cut_off(tmp_path: Path) -> None:
    class Unreached:
        def FetchState(self, request: session_pb2.FetchStateRequest) -> None:
            raise AssertionError("the request got through")

    stub: Any = Unreached()
    chaos = cut(tmp_path, ANN, "coordinator")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fetch_state(stub, ANN, Generation(1), ["x"], lambda header: None, chaos=chaos), 0.3)
