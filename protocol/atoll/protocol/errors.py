"""Every error that Atoll raises on purpose.

    AtollError
    ├── JobError            the job file or a flag is wrong: the field, its value, the fix
    ├── GraphRefused        an op graph that this process will not execute: the node, the reason
    ├── ExecutionFailed     a node that torch could not execute on the data it got
    ├── TraceError          a model that cannot be turned into an op graph
    ├── PlacementError      the stages do not fit the peers: how much is missing
    ├── WireError           bytes from the other side that break the protocol (a remote fault)
    │   ├── CorruptMessage  a message whose checksum or size disagrees with its header
    │   └── MissingState    a message that another one must be decoded before
    ├── LinkError           a neighbour that cannot be reached, went silent, or keeps sending corrupt messages
    │   └── Unreached       a neighbour that cannot even be dialled
    ├── Implausible     a neighbour's values that no honest stage would send: refused
    ├── RoundFailed         replicas that could not average: whom the others waited for
    ├── SessionError        the coordinator refused this peer, or cannot be reached
    ├── IdentityRefused     a token or certificate that is not believed, or does not allow what is asked
    ├── NumericalFault      a loss or gradient that is not finite: stage and step
    ├── RunFailed           the run cannot go on: the last line says why
    ├── DamagedSnapshot     state on a disk that is not what was written there
    └── ResourceError       a port in use, a full disk, too little memory: what to do

``assert`` is for our own mistakes only; what another process or a person did wrong raises one of these.
"""

from __future__ import annotations

from atoll.protocol.ids import NodeIndex, PeerId, StageIndex, StepNumber


class AtollError(Exception):
    """Root of all errors raised on purpose. ``str(error)`` is a sentence fit for a person."""


class JobError(AtollError):
    """A value in the job file (or in ``--set``) is wrong.

    ``field`` is the dotted path of the field, for example ``training.microbatch``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class GraphRefused(AtollError):
    """An op graph is not executed, because of ``reason``; ``node`` is the offending node's index, if one is to blame."""

    def __init__(self, reason: str, node: int | None = None) -> None:
        super().__init__(reason if node is None else f"node {node}: {reason}")
        self.reason = reason
        self.node = node


class ExecutionFailed(AtollError):
    """A valid graph whose node ``node`` failed on the data it got, for example on a token id beyond the vocabulary."""

    def __init__(self, message: str, node: int) -> None:
        super().__init__(message)
        self.node = node


class TraceError(AtollError):
    """A model that cannot be traced into an op graph; the sentence says what to change in the model."""


class PlacementError(AtollError):
    """No placement satisfies the limits. ``missing_bytes`` is by how much memory the best attempt fails, ``uncovered`` are the
    ranges of nodes for which there is no room; ``hopeless``: whoever joined, there would be none."""

    def __init__(
        self,
        message: str,
        missing_bytes: int = 0,
        *,
        uncovered: tuple[tuple[NodeIndex, NodeIndex], ...] = (),
        hopeless: bool = False,
    ) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.uncovered = uncovered
        self.hopeless = hopeless


class WireError(AtollError):
    """What arrived is not what the protocol allows: the fault is on the other side."""


class CorruptMessage(WireError):
    """A whole message whose checksum or size disagrees with its header; asked for again."""


class MissingState(WireError):
    """An undamaged message that refers to another one, which is not here yet: decode it after that one."""


class LinkError(AtollError):
    """The link to ``peer`` is broken; ``corrupt`` says that it kept sending messages that fail their checksum."""

    def __init__(self, peer: PeerId, message: str, *, corrupt: bool = False) -> None:
        super().__init__(f"link to {peer}: {message}")
        self.peer = peer
        self.corrupt = corrupt


class Unreached(LinkError):
    """No connection to the peer came about."""


class Implausible(AtollError):
    """What ``peer`` sent is intact, and is not taken: such values cannot come of the training so far."""

    def __init__(self, peer: PeerId, message: str) -> None:
        super().__init__(f"{message}; refused from {peer}")
        self.peer = peer


class RoundFailed(AtollError):
    """Replicas did not average. ``suspects`` are those who failed or were waited for, as far as this one can tell."""

    def __init__(self, message: str, suspects: tuple[PeerId, ...] = ()) -> None:
        super().__init__(message)
        self.suspects = suspects


class SessionError(AtollError):
    """The coordinator refused this peer or cannot be reached."""


class IdentityRefused(AtollError):
    """Somebody has not shown who they are, or may not do what they ask; the sentence holds nothing secret."""


class NumericalFault(AtollError):
    """A value that is not finite, seen first by ``stage`` at ``step``."""

    def __init__(self, stage: StageIndex, step: StepNumber, what: str) -> None:
        super().__init__(f"stage {stage} saw {what} at step {step}")
        self.stage = stage
        self.step = step
        self.what = what


class RunFailed(AtollError):
    """The run ended without finishing; the sentence is the reason."""


class DamagedSnapshot(AtollError):
    """A snapshot's file whose bytes and hashes disagree, or that cannot be read: it is of no use, another copy may be."""


class ResourceError(AtollError):
    """The machine lacks something: a free port, disk space, memory. The sentence says what to do."""
