"""Random numbers that depend on what is computed, never on who computes it or when.

Each random node is seeded by (run seed, step, microbatch, node), each initial value by (run seed, name): a replay, a
recomputation or another cut draws the same numbers. torch's generators belong to the whole process, so seeding one and
drawing from it happen under one lock, which is the only thing here that several peers of one process share.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from atoll.protocol.ids import MicrobatchIndex, NodeIndex, StepNumber

# Guards torch's own process-wide generators; it is a module's because they are a module's.
_GENERATORS = threading.RLock()


def node_seed(run_seed: int, step: StepNumber, microbatch: MicrobatchIndex, node: NodeIndex) -> int:
    """The seed of one random node in one microbatch of one step."""
    return _seed(f"{run_seed}/{step}/{microbatch}/{node}")


def name_seed(run_seed: int, name: str) -> int:
    """The seed of the initial value of the parameter or buffer ``name``."""
    return _seed(f"{run_seed}/{name}")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode()).digest()[:8], "big") & (2**63 - 1)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """The device's default generator, freshly seeded and not touched by other threads of Atoll inside the block."""
    with _GENERATORS:
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        elif device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield
