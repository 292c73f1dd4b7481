"""State by name as stages have it, for tests of what stores and sends it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atoll.protocol.state import moment_name


def state_of(*names: str, num_elements: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights with AdamW's moments, and a counter as batch norm has it."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name in names:
        for each in (name, moment_name(name, "exp_avg"), moment_name(name, "exp_avg_sq")):
            state[each] = torch.randn(num_elements, generator=generator)
        state[moment_name(name, "step")] = torch.tensor(5.0)
    state["half"] = torch.randn(3, generator=generator).to(torch.bfloat16)
    state["counter"] = torch.tensor(7, dtype=torch.int64)
    return state


def assert_same_state(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
