"""Who may call what: every RPC there is, and the roles that it is for. What is not here is refused.

The guard asks this table before a servicer sees anything. The servicers check what only they know: that a name in a message is
the caller's own, and that the present plan, or a permit of the coordinator, allows this caller this.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.protocol.identity import Role

_PACKAGE = "atoll.protocol.v1"
_OF_COORDINATOR: Mapping[str, frozenset[Role]] = {
    "Enrolment/Enrol": frozenset({Role.INVITATION}),
    "Enrolment/Renew": frozenset({Role.PEER}),
    "Coordinator/Session": frozenset({Role.PEER}),
    "Coordinator/StoreState": frozenset({Role.PEER}),
    "Coordinator/FetchState": frozenset({Role.PEER}),
    "Examination/Examine": frozenset({Role.PEER}),
    "Relay/Tunnel": frozenset({Role.PEER}),
    "Operator/Status": frozenset({Role.OPERATOR}),
    "Operator/Fleet": frozenset({Role.OPERATOR}),
    "Operator/Stop": frozenset({Role.OPERATOR}),
    "Operator/Export": frozenset({Role.OPERATOR}),
    "Operator/Replan": frozenset({Role.OPERATOR}),
    "Operator/RemovePeer": frozenset({Role.OPERATOR}),
    "Operator/AllowPeer": frozenset({Role.OPERATOR}),
}
_OF_PEERS: Mapping[str, frozenset[Role]] = {
    "Links/Link": frozenset({Role.PEER}),
    "State/Fetch": frozenset({Role.PEER, Role.COORDINATOR}),  # the coordinator fills stores from peers' disks
    "Reach/Greet": frozenset({Role.COORDINATOR}),
    "Probes/Probe": frozenset({Role.PEER}),  # of the coordinator as well
}
ALLOWED: Mapping[str, frozenset[Role]] = {
    f"/{_PACKAGE}.{method}": roles for method, roles in {**_OF_COORDINATOR, **_OF_PEERS}.items()
}


def is_allowed(method: str, role: Role) -> bool:
    """``method`` as gRPC writes it, ``/package.Service/Method``."""
    return role in ALLOWED.get(method, frozenset())


def refusal(method: str, role: Role) -> str:
    """Why not, in a sentence."""
    roles = ALLOWED.get(method)
    if not roles:
        return f"nobody may call {method}"
    return f"{method} is for the role {' or '.join(sorted(roles))}, and this certificate is for the role {role}"
