"""What the peers of a swarm on this machine are started with: so many alike, or those of a fleet file as far as one machine can
stand for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.coordinator.cli.exits import UsageError
from atoll.protocol.job_errors import listed

if TYPE_CHECKING:
    from atoll.coordinator.planning.fleet import Fleet
    from atoll.protocol.job import Job


COORDINATOR = "coordinator"
"""What the coordinator's own log is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPeer:
    """A peer to start. None: as much as there is. Rates are in bytes a second."""

    name: str
    threads: int
    memory_bytes: int | None = None
    upload: float | None = None
    download: float | None = None

    @property
    def words(self) -> list[str]:
        """Its flags of `atoll-peer join`."""
        words = ["--name", self.name, "--threads", str(self.threads)]
        if self.memory_bytes is not None:
            words += ["--max-memory", str(self.memory_bytes)]
        for flag, rate in (("--max-upload", self.upload), ("--max-download", self.download)):
            if rate is not None:
                words += [flag, f"{8.0 * rate:.0f}bps"]
        return words


def equal_peers(count: int, cores: int) -> tuple[LocalPeer, ...]:
    """``peer-1`` to ``peer-COUNT``, which share the cores evenly."""
    threads = max(1, cores // count)
    return tuple(LocalPeer(name=f"peer-{number}", threads=threads) for number in range(1, count + 1))


def peers_of(fleet: Fleet, cores: int) -> tuple[LocalPeer, ...]:
    """The peers of a fleet file; one whose speed is given in FLOP/s gets an even share of the cores. Raises UsageError."""
    if any(peer.name == COORDINATOR for peer in fleet.peers):
        raise UsageError(f"a peer called {COORDINATOR!r} would write into the coordinator's log: give it another name")
    share = max(1, cores // len(fleet.peers))
    return tuple(
        LocalPeer(
            name=peer.name,
            threads=peer.threads or share,
            memory_bytes=int(peer.memory),
            upload=peer.upload,
            download=peer.download,
        )
        for peer in fleet.peers
    )


def trust_of(fleet: Fleet, job: Job) -> tuple[str, ...]:
    """Overrides of the job that keep peers whom the file does not trust off the ends. Raises UsageError when none is left."""
    if not job.plan.trusted_ends:
        return ()
    names = {peer.name for peer in fleet.peers if peer.trusted}
    trusted = [name for name in job.plan.trusted or sorted(names) if name in names]
    if not trusted:
        listed = ", ".join(job.plan.trusted) or "those that it trusts"
        raise UsageError(f"plan.trusted_ends needs a peer of plan.trusted ({listed}) that the fleet file has and trusts")
    return (f"plan.trusted=[{', '.join(trusted)}]",)


def not_imitated(fleet: Fleet, cores: int) -> str:
    """What of the file does not show in a swarm on this machine, in a sentence; empty when all does."""
    missing = list(_missing(fleet))
    threads = sum(peer.threads or 0 for peer in fleet.peers)
    sentences = []
    if missing:
        sentences.append(f"one machine does not imitate {listed(missing, 'and')} of the fleet file")
    if threads > cores:
        sentences.append(f"its {threads} threads share the {cores} cores of this machine")
    return "; ".join(sentences)


def _missing(fleet: Fleet) -> Iterator[str]:
    for key in ("flops", "rtt"):
        if any(getattr(peer, key) is not None for peer in fleet.peers):
            yield key
    if fleet.links:
        yield "links"
