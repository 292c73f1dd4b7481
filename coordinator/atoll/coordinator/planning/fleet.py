"""A fleet file: peers that one might have, to plan for before any of them has joined.

    peers:
      - {name: attic, threads: 4, memory: 8GiB, upload: 20Mbps, download: 200Mbps, rtt: 30ms}
      - {name: lab, flops: 12TFLOPS, memory: 24GB}
    links:
      - {between: [attic, lab], bandwidth: 15Mbps, rtt: 45ms}
      - {from: lab, to: attic, bandwidth: 80Mbps}

A peer's ``upload`` and ``download`` bound all its connections together and its ``rtt`` is to the coordinator; a link's
``bandwidth`` and ``rtt`` are those of one pair. What is left out is unknown and estimated. Peers that name the same ``machine``
share its ``cores``, which one of them gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from atoll.coordinator.planning.network import LinkMeasurement, Network, PeerLine, build_network
from atoll.coordinator.planning.segments import PeerOffer
from atoll.protocol.errors import JobError
from atoll.protocol.ids import PEER_NAME, PeerId
from atoll.protocol.job_errors import WrongValue, job_error, listed, show, suggestion
from atoll.protocol.job_fields import Section
from atoll.protocol.job_text import parse_mapping
from atoll.protocol.quantities import parse_bytes, parse_flops, parse_rate, parse_seconds

FLOPS_PER_THREAD = 3e10
"""What a thread of an ordinary processor does in single precision, where a fleet file gives threads alone."""


def _quantity(parse: Callable[[str], float | None], what: str) -> Callable[[object], float]:
    """A validator that reads a quantity with its unit; plain numbers are in the base unit."""

    def read(value: object) -> float:
        found = parse(value) if isinstance(value, str) else value
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
            raise WrongValue("", f"{show(value)} is not {what}")
        return float(found)

    return read


Size: TypeAlias = Annotated[
    float, BeforeValidator(_quantity(parse_bytes, "an amount of memory; write for example 8GiB or 500MB"))
]
Rate: TypeAlias = Annotated[
    float, BeforeValidator(_quantity(parse_rate, "a rate; write for example 20Mbps, bits a second and not bytes"))
]
Speed: TypeAlias = Annotated[
    float, BeforeValidator(_quantity(parse_flops, "a speed; write for example 4.5TFLOPS, operations a second"))
]
Duration: TypeAlias = Annotated[float, BeforeValidator(_quantity(parse_seconds, "a time; write for example 30ms or 0.2s"))]


class FleetPeer(Section):
    """One peer. Either ``threads`` or ``flops``; rates in bytes a second, ``rtt`` in seconds."""

    name: Annotated[str, Field(examples=["attic"])]
    threads: Annotated[int, Field(ge=1, examples=[4])] | None = None
    """Threads of its processor that it computes with."""
    flops: Speed | None = None
    """Operations a second that it reaches, of a GPU for example."""
    memory: Annotated[Size, Field(examples=["8GiB"])]
    """What it offers; a plan leaves a part of it free."""
    upload: Rate | None = None
    download: Rate | None = None
    rtt: Duration | None = None
    """There and back to the coordinator."""
    trusted: bool = True
    """Whether it may hold the first and last stage of a job with trusted ends."""
    machine: Annotated[str, Field(min_length=1, max_length=64, examples=["workshop"])] | None = None
    """The computer it runs on, where several peers share one."""
    cores: Annotated[int, Field(ge=1, examples=[8])] | None = None
    """Processor cores of that computer."""

    @field_validator("name")
    @classmethod
    def _as_a_peer_may_join(cls, value: str) -> str:
        if not PEER_NAME.fullmatch(value):
            raise WrongValue("", f"{show(value)} is not a name; use up to 64 letters, digits, dots, hyphens and underscores")
        return value

    @model_validator(mode="after")
    def _one_speed(self) -> Self:
        if (self.threads is None) == (self.flops is None):
            given = "neither is given" if self.threads is None else "both are given"
            raise WrongValue("", f"{given} for {self.name!r}; write either threads or flops")
        if self.cores is not None and self.machine is None:
            raise WrongValue("cores", f"of which machine is not said for {self.name!r}; write machine: NAME as well")
        return self

    @property
    def flops_per_second(self) -> float:
        """Its speed, estimated from the threads where only those are given."""
        return self.flops if self.flops is not None else FLOPS_PER_THREAD * (self.threads or 1)


class FleetLink(Section):
    """One pair, both ways with ``between``, one way with ``from`` and ``to``."""

    between: Annotated[tuple[str, str], Field(strict=False, examples=[["attic", "lab"]])] | None = None
    source: Annotated[str | None, Field(alias="from", examples=["lab"])] = None
    target: Annotated[str | None, Field(alias="to", examples=["attic"])] = None
    bandwidth: Rate | None = None
    """In bytes a second."""
    rtt: Duration | None = None
    """In seconds, there and back."""

    @model_validator(mode="after")
    def _one_pair(self) -> Self:
        one_way = self.source is not None and self.target is not None
        if self.between is not None and (self.source is not None or self.target is not None):
            raise WrongValue("", "between and from/to are given; write between for both directions, or from and to for one")
        if self.between is None and not one_way:
            raise WrongValue("", "the pair is missing; write between: [ONE, OTHER], or from: ONE and to: OTHER")
        if self.bandwidth is None and self.rtt is None:
            raise WrongValue("", "neither bandwidth nor rtt is given; write at least one")
        return self

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The directions that this is about."""
        if self.between is not None:
            return self.between, (self.between[1], self.between[0])
        assert self.source is not None, "checked when the link was read"
        assert self.target is not None, "checked when the link was read"
        return ((self.source, self.target),)


class Fleet(Section):
    """A whole fleet."""

    peers: Annotated[tuple[FleetPeer, ...], Field(strict=False)]
    links: Annotated[tuple[FleetLink, ...], Field(strict=False)] = ()

    @field_validator("peers", mode="after")
    @classmethod
    def _distinct(cls, peers: tuple[FleetPeer, ...]) -> tuple[FleetPeer, ...]:
        if not peers:
            raise WrongValue("", "the list is empty; write at least one peer")
        seen: set[str] = set()
        for index, peer in enumerate(peers):
            if peer.name in seen:
                raise WrongValue(f"{index}.name", f"two peers are named {peer.name!r}; give one of them another name")
            seen.add(peer.name)
        return peers

    @model_validator(mode="after")
    def _machines_have_cores(self) -> Self:
        for peer in self.peers:
            cores = self.cores_of(peer.machine)
            if peer.machine is not None and len(cores) != 1:
                said = f"has both {listed([str(number) for number in cores], 'and')} cores" if cores else "has no cores"
                raise WrongValue("peers", f"the machine {peer.machine!r} {said}; write the same cores: NUMBER at its peers")
        return self

    def cores_of(self, machine: str | None) -> list[int]:
        """What its peers say of the machine, each number once."""
        return sorted({peer.cores for peer in self.peers if peer.machine == machine and peer.cores is not None})

    @model_validator(mode="after")
    def _links_join_peers(self) -> Self:
        for wrong in self._wrong_links():
            raise wrong
        return self

    def _wrong_links(self) -> Iterator[WrongValue]:
        names = [peer.name for peer in self.peers]
        seen: dict[tuple[str, str], int] = {}
        for index, link in enumerate(self.links):
            for pair in link.pairs:
                for name in pair:
                    if name not in names:
                        yield WrongValue(f"links.{index}", f"there is no peer {name!r}; {suggestion(name, names)}")
                if pair[0] == pair[1]:
                    yield WrongValue(f"links.{index}", f"{pair[0]!r} has no link to itself; name two peers")
                if pair in seen:
                    twice = f"from {pair[0]!r} to {pair[1]!r} is given twice, at links.{seen[pair]} as well"
                    yield WrongValue(f"links.{index}", f"{twice}; keep one of them")
                seen[pair] = index


def parse_fleet(values: dict[str, Any]) -> Fleet:
    """The fleet that ``values`` describe. Raises JobError."""
    try:
        return Fleet.model_validate(values)
    except ValidationError as error:
        raise job_error(error, Fleet) from error


def load_fleet(path: Path) -> Fleet:
    """Read the fleet file ``path``. Raises JobError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise JobError(
            "", f"cannot read the fleet file {str(path)!r}: {error.strerror}; give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise JobError("", f"the fleet file {str(path)!r} is not UTF-8 text; give the path of a YAML file") from error
    return parse_fleet(parse_mapping(text, f"the fleet file {str(path)!r}", "a fleet", "has the key peers, and maybe links"))


def fleet_offers(fleet: Fleet) -> tuple[PeerOffer, ...]:
    """The peers as the planner takes them."""
    return tuple(
        PeerOffer(
            name=PeerId(peer.name),
            flops_per_second=peer.flops_per_second,
            memory_bytes=int(peer.memory),
            trusted=peer.trusted,
            vouched=peer.trusted,
            coordinator_round_trip_seconds=peer.rtt or 0.0,
            machine=peer.machine or "",
            cores=0 if peer.machine is None else fleet.cores_of(peer.machine)[0],
            threads=peer.threads or 1,
        )
        for peer in fleet.peers
    )


def fleet_network(fleet: Fleet) -> Network:
    """The links as the planner takes them; pairs that the file does not give are estimated."""
    lines = {
        PeerId(peer.name): PeerLine(
            upload_bytes_per_second=peer.upload,
            download_bytes_per_second=peer.download,
            latency_seconds=None if peer.rtt is None else peer.rtt / 2.0,
        )
        for peer in fleet.peers
    }
    measurements = [
        LinkMeasurement(
            source=PeerId(source),
            target=PeerId(target),
            bytes_per_second=link.bandwidth,
            latency_seconds=None if link.rtt is None else link.rtt / 2.0,
        )
        for link in fleet.links
        for source, target in link.pairs
    ]
    return build_network(lines, measurements, lines)
