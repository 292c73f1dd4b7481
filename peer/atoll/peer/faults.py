"""What can go wrong in a peer, as values: the one place where exceptions become faults that the coordinator understands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from atoll.protocol.errors import AtollError, GraphRefused, Implausible, LinkError, NumericalFault, ResourceError, WireError
from atoll.protocol.ids import PeerId
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.v1 import session_pb2


class FaultKind(IntEnum):
    """The values of the protocol's ``Fault.FaultKind``."""

    NOT_FINITE = session_pb2.Fault.FAULT_NOT_FINITE
    LINK = session_pb2.Fault.FAULT_LINK
    CORRUPT = session_pb2.Fault.FAULT_CORRUPT
    REFUSED_GRAPH = session_pb2.Fault.FAULT_REFUSED_GRAPH
    MEMORY = session_pb2.Fault.FAULT_MEMORY
    INTERNAL = session_pb2.Fault.FAULT_INTERNAL
    OUTLIER = session_pb2.Fault.FAULT_OUTLIER


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``reason`` is a sentence; ``accused`` is another peer whose fault it is."""

    kind: FaultKind
    reason: str
    accused: PeerId | None = None


def fault_of(error: BaseException, *, doing: str, sender: PeerId | None = None) -> Fault:
    """The fault that ``error`` amounts to.

    ``doing`` says what this peer was at, in words that can follow "during"; ``sender`` is whose data it was using.
    """
    match error:
        case NumericalFault():
            return Fault(kind=FaultKind.NOT_FINITE, reason=str(error))
        case GraphRefused():
            return Fault(kind=FaultKind.REFUSED_GRAPH, reason=str(error))
        case LinkError():
            kind = FaultKind.CORRUPT if error.corrupt else FaultKind.LINK
            return Fault(kind=kind, reason=str(error), accused=None if error.peer == COORDINATOR else error.peer)
        case Implausible():
            return Fault(kind=FaultKind.OUTLIER, reason=str(error), accused=error.peer)
        case WireError():
            return Fault(kind=FaultKind.CORRUPT, reason=f"{doing}: {error}", accused=sender)
        case ResourceError():
            return Fault(kind=FaultKind.MEMORY, reason=f"{doing}: {error}")
        case AtollError():
            return Fault(kind=FaultKind.INTERNAL, reason=f"{doing}: {error}")
    if _is_out_of_memory(error):
        return Fault(kind=FaultKind.MEMORY, reason=f"out of memory during {doing}: {_first_line(error)}")
    return Fault(kind=FaultKind.INTERNAL, reason=f"{type(error).__name__} during {doing}: {_first_line(error)}")


def _is_out_of_memory(error: BaseException) -> bool:
    """The CPU allocator of torch raises a plain RuntimeError, told apart by its text alone."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "can't allocate memory" in text)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or "no further text"
