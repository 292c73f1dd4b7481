"""What a peer answers when the coordinator asks how fast a link is: always something, and within the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from atoll.protocol.errors import AtollError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.ids import PeerId
from atoll.protocol.pacing import Pacer
from atoll.protocol.probe_client import ProbeTarget, probe_link
from atoll.protocol.security import Security
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.v1 import session_pb2

_MOST_SECONDS = 60.0
"""The longest that a probe takes, whatever the coordinator allows."""


async def answer_probe(
    probe: session_pb2.Probe,
    *,
    own: PeerId,
    coordinator: str,
    pacers: Sequence[Pacer] = (),
    max_download: float | None = None,
    chaos: FaultPoints | None = None,
    security: Security | None = None,
) -> session_pb2.Probed:
    """Measures the link to the peer that ``probe`` names, or to the coordinator at the address ``coordinator``."""
    target = ProbeTarget(name=PeerId(probe.peer or COORDINATOR), address=probe.address or coordinator)
    limit_seconds = min(max(0.0, probe.limit_seconds), _MOST_SECONDS)
    try:
        async with asyncio.timeout(limit_seconds):
            await (chaos or FaultPoints()).passable(target.name)
        speed = await probe_link(
            target,
            own=own,
            limit_seconds=limit_seconds,
            latency_only=probe.latency_only,
            pacers=pacers,
            max_download=max_download,
            security=security,
        )
    except AtollError as error:
        return session_pb2.Probed(number=probe.number, failure=str(error))
    except TimeoutError:
        return session_pb2.Probed(number=probe.number, failure=f"{target.name} did not answer within {limit_seconds:g} s")
    return session_pb2.Probed(
        number=probe.number,
        round_trip_seconds=speed.round_trip_seconds,
        upload_bytes_per_second=speed.upload_bytes_per_second or 0.0,
        download_bytes_per_second=speed.download_bytes_per_second or 0.0,
    )
