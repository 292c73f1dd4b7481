"""The names of things, as types: a stage index cannot be passed where a generation is meant."""

from typing import NewType

PeerId = NewType("PeerId", str)
StageIndex = NewType("StageIndex", int)
Generation = NewType("Generation", int)
StepNumber = NewType("StepNumber", int)
MicrobatchIndex = NewType("MicrobatchIndex", int)
NodeIndex = NewType("NodeIndex", int)
