"""Who may send a peer what: the replica that the plan deals a microbatch to, and nobody else. Pure."""

from __future__ import annotations

from atoll.protocol.assignment import Assignment
from atoll.protocol.ids import PeerId
from atoll.protocol.messages import Kind, MessageKey

BETWEEN_REPLICAS = frozenset({Kind.PART, Kind.TOTAL, Kind.AGREEMENT})


def refusal_of_sender(assignment: Assignment, sender: PeerId, key: MessageKey) -> str | None:
    """Why ``sender`` may not send the peer of ``assignment`` what has this key; None when it may."""
    group = next((group for group in assignment.groups if group.stage == key.source), None)
    if group is None or sender not in group.replicas:
        return f"{sender} does not hold stage {key.source}"
    if key.kind in BETWEEN_REPLICAS:
        return None
    if key.kind is Kind.TIED_GRADIENT:
        return None if sender == group.leader else f"{sender} is not the first replica of stage {key.source}"
    if group.holder_of(key.microbatch) != sender:
        return f"microbatch {key.microbatch} is not dealt to {sender}, but to {group.holder_of(key.microbatch)}"
    if assignment.group.holder_of(key.microbatch) != assignment.peer:
        return f"microbatch {key.microbatch} is not dealt to this peer, but to {assignment.group.holder_of(key.microbatch)}"
    return None
