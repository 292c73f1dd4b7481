"""Connections that say nothing, and ones that send garbage as fast as they can, while a run trains over TLS."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from atoll.coordinator.events import PeerEvent, StepEvent, VoidEvent
from support.coordinated import Coordinated, coordinated, tiny_job
from support.strangers import strangers_at

MOST_GROWTH = 1.10
STEPS = 40
"""Of each part of the measurement: before they come, while they are there, and after they have gone."""
SETTLING_STEPS = 5


def assert_undisturbed(run: Coordinated) -> None:
    assert run.told(VoidEvent) == []
    assert [event.name for event in run.told(PeerEvent) if event.state == "lost"] == []


@pytest.mark.timeout(300)
async def test_who_belongs_is_not_disturbed(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=10, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=2, insecure=False) as run:
        await run.until_told(StepEvent, step=1)
        async with strangers_at([run.address, *addresses_of(run)], silent=20, noisy=2):
            assert (await run.ended()).finished
        assert_undisturbed(run)


@pytest.mark.release
@pytest.mark.timeout(1800)
async def test_a_thousand_strangers_make_steps_little_longer(tmp_path: Path) -> None:
    """On a machine that does nothing else. The steps before and after are one measurement: a machine gets slower by itself."""
    options = {"layers": 4, "width": 128, "heads": 4, "context": 64}
    job = tiny_job(tmp_path, steps=4 * STEPS, batch=16, options=options, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state", peers=2, insecure=False) as run:
        await run.until_told(StepEvent, step=STEPS)
        came = run.told(StepEvent)[-1].step
        async with strangers_at([run.address, *addresses_of(run)], silent=1000, noisy=100):
            first = run.told(StepEvent)[-1].step + 1
            await run.until_told(StepEvent, step=first + STEPS)
            went = run.told(StepEvent)[-1].step + SETTLING_STEPS
        assert (await run.ended()).finished
        assert_undisturbed(run)
        seconds = {event.step: event.seconds for event in run.told(StepEvent)}
        during = median(seconds[step] for step in range(first, first + STEPS))
        others = median(taken for step, taken in seconds.items() if SETTLING_STEPS < step <= came or step > went)
        print(f"{1e3 * others:.1f} ms a step without strangers, {1e3 * during:.1f} ms with: {during / others:.3f}")
        assert during / others < MOST_GROWTH


def addresses_of(run: Coordinated) -> list[str]:
    """Where the run's peers listen."""
    return [member.introduction.address for member in run.coordinator._sessions.membership]
