"""What a plan says of memory is what peer processes take: within a tenth."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from support.memory_grid import GRID, gpt, resnet
from support.memory_trials import Found, Trial, run_trial

WITHIN = 0.1

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory's peak is read from Linux's /proc"),
]

SMALL = {
    "a tied GPT under AdamW": partial(
        gpt, "small", layers=4, width=768, rows=1, tied=True, dropout=0.1, in_flight=(3, 2), microbatches=4
    ),
    "a ResNet that computes activations anew": partial(
        resnet, "small", depth=50, rows=4, in_flight=(2, 2), recompute=True, microbatches=3
    ),
}


def assert_near(stages: list[Found]) -> None:
    assert {stage.stage: round(stage.error, 3) for stage in stages if abs(stage.error) > WITHIN} == {}, stages


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SMALL)
async def test_the_memory_of_small_stages(name: str) -> None:
    trial: Trial = SMALL[name]()
    assert_near(await run_trial(trial))


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", GRID)
async def test_the_memory_of_the_grid(name: str) -> None:
    assert_near(await run_trial(GRID[name]()))
