"""The names of things, as types: a stage index cannot be passed where a generation is meant."""

import re
from typing import NewType

PeerId = NewType("PeerId", str)
StageIndex = NewType("StageIndex", int)
Generation = NewType("Generation", int)
StepNumber = NewType("StepNumber", int)
MicrobatchIndex = NewType("MicrobatchIndex", int)
NodeIndex = NewType("NodeIndex", int)

PEER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a peer may be called: it becomes the name of a file, and a word in sentences."""

COORDINATOR = PeerId("coordinator")
"""How errors name the coordinator's end, and whom to dial there; no peer is called so."""
