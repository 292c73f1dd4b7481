"""Codecs as job files name them, in order of what they cost the loss. What they do is ``compression``'s."""

from __future__ import annotations

LADDER = (
    "raw",
    "bf16",
    "int8",
    "transform",
    "transform-1.75",
    "transform-1.5",
    "transform-1",
    "int4",
    "transform-0.7",
    "transform-0.5",
    "int3",
    "int2",
)
"""All codecs that may be chosen from link by link, by what they have cost models that were trained through them, the least
first."""
LAST_BY_ITSELF = "transform-1.75"
"""Those that follow are used only where a job asks for them, for what they cost shows in the loss of many models."""
OTHERS = ("fp32", "fp16", "topk-10", "topk-1", "delta-4", "delta-2")
"""Those that a job may name and nobody chooses by himself: baselines, and what suits some jobs alone."""
ADAPTIVE = "adatopk"
"""No codec but a rule, FusionLLM's, which gives each link one: the slowest sends the fewest elements."""
ADAPTIVE_RATIO = 100.0
"""The slowest link sends the bytes of a tensor divided by this."""
