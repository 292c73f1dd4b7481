"""What a peer answers when the coordinator asks how fast a link is: always something, and within the limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from atoll.peer.links.tunnels import Tunnels
from atoll.protocol.errors import AtollError, Unreached
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.ids import PeerId
from atoll.protocol.pacing import Pacer
from atoll.protocol.probe_client import LinkSpeed, ProbeTarget, probe_link
from atoll.protocol.security import Security
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.v1 import session_pb2

_MOST_SECONDS = 60.0
"""The longest that a probe takes, whatever the coordinator allows."""
_DIRECT_SECONDS = 1.0
"""For dialling somebody whom the coordinator could not dial, and who may be next door all the same."""


async def answer_probe(
    probe: session_pb2.Probe,
    *,
    own: PeerId,
    coordinator: str,
    tunnels: Tunnels | None = None,
    pacers: Sequence[Pacer] = (),
    max_download: float | None = None,
    chaos: FaultPoints | None = None,
    security: Security | None = None,
) -> session_pb2.Probed:
    """Measures the link to the peer that ``probe`` names, or to the coordinator at the address ``coordinator``; through
    ``tunnels`` where it says so and the peer cannot be dialled."""
    target = ProbeTarget(name=PeerId(probe.peer or COORDINATOR), address=probe.address or ("" if probe.peer else coordinator))
    limit_seconds = min(max(0.0, probe.limit_seconds), _MOST_SECONDS)
    deadline = time.monotonic() + limit_seconds

    async def measured(target: ProbeTarget, connect_seconds: float | None = None) -> LinkSpeed:
        return await probe_link(
            target,
            own=own,
            limit_seconds=max(0.0, deadline - time.monotonic()),
            connect_seconds=connect_seconds,
            latency_only=probe.latency_only,
            pacers=pacers,
            max_download=max_download,
            security=security,
        )

    relayed, relay = False, tunnels if probe.relay else None
    try:
        async with asyncio.timeout(limit_seconds):
            await (chaos or FaultPoints()).passable(target.name)
        try:
            if not target.address:
                raise Unreached(target.name, "it accepts no connection")
            speed = await measured(target, _DIRECT_SECONDS if relay is not None else None)
        except Unreached:
            if relay is None:
                raise
            relayed = True
            speed = await measured(replace(target, address=await relay.address(target.name, "", relayed=True)))
    except AtollError as error:
        return session_pb2.Probed(number=probe.number, failure=str(error))
    except TimeoutError:
        return session_pb2.Probed(number=probe.number, failure=f"{target.name} did not answer within {limit_seconds:g} s")
    return session_pb2.Probed(
        number=probe.number,
        round_trip_seconds=speed.round_trip_seconds,
        upload_bytes_per_second=speed.upload_bytes_per_second or 0.0,
        download_bytes_per_second=speed.download_bytes_per_second or 0.0,
        relayed=relayed,
    )
