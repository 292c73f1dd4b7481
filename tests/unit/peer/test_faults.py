"""What an exception in a peer amounts to."""

from __future__ import annotations

import pytest
import torch

from atoll.peer.faults import FaultKind, fault_of
from atoll.protocol.errors import GraphRefused, Implausible, LinkError, NumericalFault, ResourceError, SessionError, WireError
from atoll.protocol.ids import PeerId, StageIndex, StepNumber
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.v1 import session_pb2

BOB = PeerId("bob")


@pytest.mark.parametrize(
    ("error", "kind", "accused"),
    [
        (NumericalFault(StageIndex(1), StepNumber(5), "a loss of nan"), FaultKind.NOT_FINITE, None),
        (GraphRefused("no", 3), FaultKind.REFUSED_GRAPH, None),
        (LinkError(BOB, "silent"), FaultKind.LINK, BOB),
        (LinkError(BOB, "damaged", corrupt=True), FaultKind.CORRUPT, BOB),
        (LinkError(COORDINATOR, "the disk is full"), FaultKind.LINK, None),
        (WireError("nonsense"), FaultKind.CORRUPT, None),
        (Implausible(BOB, "much too large"), FaultKind.OUTLIER, BOB),
        (MemoryError(), FaultKind.MEMORY, None),
        (torch.OutOfMemoryError("CUDA out of memory"), FaultKind.MEMORY, None),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), FaultKind.MEMORY, None),
        (ResourceError("memory ran out in aten.mm"), FaultKind.MEMORY, None),
        (RuntimeError("shapes"), FaultKind.INTERNAL, None),
        (SessionError("other"), FaultKind.INTERNAL, None),
        (KeyError("x"), FaultKind.INTERNAL, None),
    ],
)
def test_kind_and_accused(error: Exception, kind: FaultKind, accused: PeerId | None) -> None:
    fault = fault_of(error, doing="forward")
    assert (fault.kind, fault.accused) == (kind, accused)
    assert fault.reason


def test_an_unexpected_error_says_what_this_peer_was_doing_on_one_line() -> None:
    fault = fault_of(ValueError("first\nsecond"), doing="backward")
    assert fault.reason == "ValueError during backward: first"


def test_every_kind_of_the_protocol_has_a_name_here() -> None:
    known = {value for value in session_pb2.Fault.FaultKind.values() if value != session_pb2.Fault.FAULT_UNSPECIFIED}
    assert {kind.value for kind in FaultKind} == known
