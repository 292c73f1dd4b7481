"""What both ends of a state transfer between a peer and the coordinator agree on."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.protocol.ids import COORDINATOR as COORDINATOR
from atoll.protocol.messages import Kind

STATE_CREDIT: Mapping[Kind, int] = {Kind.STATE: 2}
"""One tensor on its way while another is being written; more would only take memory."""

TRANSFER_SILENCE_SECONDS = 60.0
"""A transfer in which nothing moves for this long has failed; longer than a disk takes to write one large tensor."""
