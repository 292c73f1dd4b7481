"""What a peer says of itself when it joins: who it is, what it can do, and what it brings. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from atoll.peer.measuring.profile import Profile
from atoll.peer.session.values import GoBack
from atoll.peer.settings import PeerSettings, software_version
from atoll.peer.state.snapshot_folder import Held
from atoll.peer.state.snapshots import held_message
from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.v1 import session_pb2


def introduction(settings: PeerSettings, profile: Profile, handling_seconds: float, address: str) -> session_pb2.Join:
    """The peer itself, an instance of its own; others reach it at ``address``."""
    return session_pb2.Join(
        protocol_version=PROTOCOL_VERSION,
        version=software_version(),
        name=settings.name,
        instance=uuid.uuid4().hex,
        address=address,
        device=profile.device,
        threads=profile.threads,
        memory_bytes=profile.memory_bytes,
        flops_per_second=profile.flops_per_second,
        handling_seconds=handling_seconds,
        machine=profile.machine,
        cores=profile.cores,
        disk_bytes=profile.disk_bytes,
        max_upload_bytes_per_second=settings.max_upload or 0.0,
        max_download_bytes_per_second=settings.max_download or 0.0,
        codecs=[
            session_pb2.CodecSpeed(
                codec=name,
                encode_bytes_per_second=speed.encode_bytes_per_second,
                decode_bytes_per_second=speed.decode_bytes_per_second,
                ratio=speed.ratio,
            )
            for name, speed in profile.codecs.items()
        ],
    )


def saying_what_is_held(
    introduced: session_pb2.Join, snapshots: Iterable[Held], back: GoBack | None = None
) -> session_pb2.Join:
    """The same with the ``snapshots`` on this peer's disk and, where it comes ``back``, with what it has in memory."""
    join = session_pb2.Join()
    join.CopyFrom(introduced)
    join.snapshots.extend(held_message(snapshot) for snapshot in snapshots)
    if back is not None:
        join.held.CopyFrom(
            session_pb2.HeldState(
                run_id=back.run_id,
                step=back.held.step,
                generation=back.generation,
                reported_step=back.held.reported_step,
                names=back.held.names,
            )
        )
    return join
