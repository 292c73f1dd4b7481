"""What a peer measures."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atoll.peer.measuring.profile import flops_per_second, free_memory_bytes, measure, offered_bytes
from atoll.protocol.errors import JobError

HEAVY = ("transformers", "matplotlib", "rich", "torch._dynamo", "torch._inductor", "sympy", "networkx", "atoll.coordinator")


def test_speed_is_that_of_a_computer() -> None:
    assert 1e7 < flops_per_second("cpu", seconds=0.02) < 1e15


def test_memory_is_real() -> None:
    profile = measure("cpu", declared_flops=1e9)
    assert profile.resident_bytes > 2**20
    assert 2**20 < profile.memory_bytes <= 2 * free_memory_bytes("cpu")
    assert (profile.flops_per_second, profile.device) == (1e9, "cpu")


def test_a_cap_is_on_the_whole_process() -> None:
    assert offered_bytes(free=1000, used=300, cap=None) == 1000
    assert offered_bytes(free=1000, used=300, cap=800) == 500
    assert offered_bytes(free=1000, used=300, cap=8000) == 1000
    with pytest.raises(JobError, match=r"--max-memory: 2 MiB are too few: this process takes 300 MiB without any layers"):
        offered_bytes(free=1000, used=300 * 2**20, cap=2 * 2**20)


def test_a_peer_loads_nothing_that_it_does_not_need() -> None:
    script = f"import sys, atoll.peer.daemon, atoll.peer.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_working_needs_no_compiler() -> None:
    """Operators on the meta device and optimizers would import it."""
    script = """
import sys
from atoll.peer.computing.no_compiler import leave_out_compiler
leave_out_compiler()
import torch
hidden = torch.nn.functional.gelu(torch.ones(2, 4, device="meta"))
torch.nn.functional.layer_norm(hidden, (4,))
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight], foreach=False)
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
assert weight[0] != 1
print([name for name in sys.modules if name.startswith(("torch._dynamo.", "torch._inductor."))])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not confine processes to processors")
def test_processes_on_the_same_processors_are_of_one_machine() -> None:
    script = "from atoll.protocol.machine import machine_name, usable_cores; print(machine_name(), usable_cores())"
    confined = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {script}"
    one, another, alone = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout.split()
        for code in (script, script, confined)
    )
    assert one == another
    assert alone[1] == "1"
    assert (alone[0] == one[0]) == (one[1] == "1")
