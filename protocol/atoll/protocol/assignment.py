"""What the coordinator assigns to a peer: its stage, its neighbours and the settings of the run; travels as one blob."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from atoll.protocol.averaging import Averaging, Transport
from atoll.protocol.errors import WireError
from atoll.protocol.graph import StageGraph
from atoll.protocol.graph_codec import stage_graph_from_proto, stage_graph_to_proto
from atoll.protocol.groups import Group
from atoll.protocol.ids import Generation, PeerId, StageIndex, StepNumber
from atoll.protocol.v1 import graph_pb2 as wire

OPTIMIZERS = ("sgd", "adamw")
PRECISIONS = ("fp32", "bf16")
LEARNING_RATE = "learning_rate"


MOST_DEFERRED = 1
"""Nothing else begins on a stage while the gradients of its weights are put off for more microbatches than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A replica of another stage, or another one of the same, that tensors are exchanged with; ``dial`` says that this side
    opens the connection, to ``address``, or ``relayed`` by the coordinator. It is sent no more than ``max_bytes_per_second``,
    where its owner has set a limit; what is used on one side only is encoded with ``codec``."""

    stage: StageIndex
    peer: PeerId
    address: str
    dial: bool
    max_bytes_per_second: float | None = None
    codec: str = "raw"
    relayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    """A peer that lends the state of ``names``, which the assigned peer does not hold itself; it is dialled at ``address``, or
    ``relayed`` by the coordinator."""

    peer: PeerId
    address: str
    names: tuple[str, ...]
    relayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """``name`` is one of OPTIMIZERS; SGD reads momentum and nesterov, AdamW the betas and epsilon."""

    name: str = "adamw"
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """A step of the run has ``count`` inner ones, in each of which a replica updates weights of its own with ``optimizer``, by
    the learning rate that comes with each batch (LEARNING_RATE among its numbers)."""

    count: int
    optimizer: OptimizerSettings

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a step has at least one inner step, got {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Everything a peer needs to know about its part of a plan.

    ``fetch`` names parameters and buffers whose first value the coordinator sends. ``link_seconds``: a neighbour that is
    silent for this long while something is due is reported. ``committed_step`` is the last step whose update is in the state
    that the peer will hold when it is ready (0: initial values). ``donors`` have what of that the peer lacks; a name that
    training does not change and that nobody gives has its first value. ``groups`` are those of this stage and of each that it
    exchanges tensors with; the peer is number ``replica`` of its own, which sums gradients as ``averaging`` says; with
    ``local`` steps these are changes of weights, and ``optimizer`` is the one that applies them. Its process is expected to
    grow by ``predicted_memory_bytes``.
    """

    generation: Generation
    graph: StageGraph
    neighbours: tuple[Neighbour, ...]
    run_seed: int
    in_flight: int
    recompute: bool
    precision: str
    optimizer: OptimizerSettings
    fetch: tuple[str, ...] = ()
    link_seconds: float = 30.0
    committed_step: StepNumber = StepNumber(0)  # noqa: RUF009 - an int at run time
    donors: tuple[Donor, ...] = ()
    groups: tuple[Group, ...]
    replica: int = 0
    averaging: Averaging = field(default_factory=Averaging)
    local: LocalSteps | None = None
    predicted_memory_bytes: int = 0

    @property
    def group(self) -> Group:
        """The replicas of this stage, this peer among them."""
        return next(group for group in self.groups if group.stage == self.graph.stage)

    @property
    def peer(self) -> PeerId:
        """Whom this is for."""
        return self.group.replicas[self.replica]


def assignment_to_bytes(assignment: Assignment) -> bytes:
    """The blob of an ASSIGNMENT message."""
    message = wire.Assignment(
        generation=assignment.generation,
        graph=stage_graph_to_proto(assignment.graph),
        neighbours=(
            wire.Neighbour(
                stage=other.stage,
                peer=other.peer,
                address=other.address,
                dial=other.dial,
                max_bytes_per_second=other.max_bytes_per_second or 0.0,
                codec=other.codec,
                relayed=other.relayed,
            )
            for other in assignment.neighbours
        ),
        run_seed=assignment.run_seed,
        in_flight=assignment.in_flight,
        recompute=assignment.recompute,
        precision=assignment.precision,
        optimizer=optimizer_to_proto(assignment.optimizer),
        fetch=assignment.fetch,
        link_seconds=assignment.link_seconds,
        committed_step=assignment.committed_step,
        donors=(
            wire.Donor(peer=donor.peer, address=donor.address, names=donor.names, relayed=donor.relayed)
            for donor in assignment.donors
        ),
        groups=(wire.Group(stage=group.stage, replicas=group.replicas, deal=group.deal) for group in assignment.groups),
        replica=assignment.replica,
        averaging=wire.Averaging(
            transport=assignment.averaging.transport,
            compression=assignment.averaging.compression,
            bandwidths=(bandwidth or 0.0 for bandwidth in assignment.averaging.bandwidths),
        ),
        local=None
        if assignment.local is None
        else wire.LocalSteps(count=assignment.local.count, optimizer=optimizer_to_proto(assignment.local.optimizer)),
        predicted_memory_bytes=assignment.predicted_memory_bytes,
    )
    return message.SerializeToString(deterministic=True)


def assignment_from_bytes(data: bytes) -> Assignment:
    """Inverse of :func:`assignment_to_bytes`; raises WireError for anything that is no assignment."""
    try:
        message = wire.Assignment.FromString(data)
    except DecodeError as error:
        raise WireError("these bytes are no assignment") from error
    if not message.HasField("graph"):
        raise WireError("the assignment has no graph")
    if message.precision not in PRECISIONS:
        raise WireError(f"the assignment's precision {message.precision!r} is none of {', '.join(PRECISIONS)}")
    if message.in_flight < 1:
        raise WireError("the assignment allows no microbatch in flight")
    graph = stage_graph_from_proto(message.graph)
    groups = tuple(map(_group, message.groups))
    own = [group for group in groups if group.stage == graph.stage]
    if len({group.stage for group in groups}) != len(groups) or not own or message.replica >= len(own[0].replicas):
        raise WireError("the assignment does not say who holds this stage with this peer")
    return Assignment(
        generation=Generation(message.generation),
        graph=graph,
        neighbours=tuple(_neighbour(other) for other in message.neighbours),
        run_seed=message.run_seed,
        in_flight=message.in_flight,
        recompute=message.recompute,
        precision=message.precision,
        optimizer=optimizer_from_proto(message.optimizer),
        fetch=tuple(message.fetch),
        link_seconds=message.link_seconds,
        committed_step=StepNumber(message.committed_step),
        donors=tuple(
            Donor(peer=PeerId(donor.peer), address=donor.address, names=tuple(donor.names), relayed=donor.relayed)
            for donor in message.donors
        ),
        groups=groups,
        replica=message.replica,
        averaging=_averaging(message.averaging),
        local=_local(message.local) if message.HasField("local") else None,
        predicted_memory_bytes=message.predicted_memory_bytes,
    )


def _group(message: wire.Group) -> Group:
    try:
        replicas = tuple(PeerId(name) for name in message.replicas)
        return Group(stage=StageIndex(message.stage), replicas=replicas, deal=tuple(message.deal))
    except ValueError as error:
        raise WireError(str(error)) from error


def _averaging(message: wire.Averaging) -> Averaging:
    try:
        bandwidths = tuple(value or None for value in message.bandwidths)
        return Averaging(transport=Transport(message.transport), compression=message.compression, bandwidths=bandwidths)
    except ValueError as error:
        raise WireError(f"gradients cannot be summed as the assignment says: {error}") from error


def _local(message: wire.LocalSteps) -> LocalSteps:
    try:
        return LocalSteps(count=message.count, optimizer=optimizer_from_proto(message.optimizer))
    except ValueError as error:
        raise WireError(str(error)) from error


def _neighbour(message: wire.Neighbour) -> Neighbour:
    limit = message.max_bytes_per_second
    if not 0.0 <= limit < math.inf:
        raise WireError(f"{message.peer} is to be sent {limit} bytes a second")
    return Neighbour(
        stage=StageIndex(message.stage),
        peer=PeerId(message.peer),
        address=message.address,
        dial=message.dial,
        max_bytes_per_second=limit or None,
        codec=message.codec or "raw",
        relayed=message.relayed,
    )


def optimizer_to_proto(settings: OptimizerSettings) -> wire.OptimizerSettings:
    """The message that :func:`optimizer_from_proto` reads back."""
    return wire.OptimizerSettings(
        name=settings.name,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        beta1=settings.beta1,
        beta2=settings.beta2,
        epsilon=settings.epsilon,
    )


def optimizer_from_proto(message: wire.OptimizerSettings) -> OptimizerSettings:
    """The settings in ``message``; raises WireError for an optimizer that does not exist."""
    if message.name not in OPTIMIZERS:
        raise WireError(f"the optimizer {message.name!r} is none of {', '.join(OPTIMIZERS)}")
    return OptimizerSettings(
        name=message.name,
        weight_decay=message.weight_decay,
        momentum=message.momentum,
        nesterov=message.nesterov,
        beta1=message.beta1,
        beta2=message.beta2,
        epsilon=message.epsilon,
    )
