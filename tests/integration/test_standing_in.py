"""A lost peer's place is taken without measuring or searching, and the run comes to what it comes to without the loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.coordinator.events import MeasurementEvent, PlanEvent, RecoveredEvent, StepEvent
from atoll.coordinator.run.deadlines import Deadlines
from atoll.coordinator.survey.survey import Surveyor
from atoll.coordinator.traced_model import TracedModel
from support.coordinated import coordinated, join_with_disks, tiny_job
from support.jobs import gpt_job
from support.runs import assert_same

STEPS = 40


def forbid_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("nothing is measured or searched for while a stage has no peer")

    monkeypatch.setattr(Surveyor, "complete", forbidden)
    monkeypatch.setattr(TracedModel, "propose", forbidden)


async def test_a_spare_takes_a_stage_over_with_what_is_known_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = gpt_job(tmp_path, steps=STEPS)
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"stages": 2})})
    async with coordinated(job, tmp_path / "calm", peers=2) as calm:
        assert (await calm.ended()).finished
    async with coordinated(job, tmp_path / "state", peers=3) as run:
        await run.until_told(StepEvent, step=2)

        forbid_looking(monkeypatch)
        (plan,) = run.told(PlanEvent)
        first, lost = (stage.peers for stage in plan.stages)
        run.kill(lost[0])
        recovered = await run.until_told(RecoveredEvent)
        monkeypatch.undo()
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    assert_same(run, calm)
    _, after = run.told(PlanEvent)[:2]
    (spare,) = {"peer-0", "peer-1", "peer-2"} - {*first, *lost}
    assert [stage.peers for stage in after.stages] == [first, (spare,)]
    assert [(stage.first, stage.last) for stage in after.stages] == [(stage.first, stage.last) for stage in plan.stages]
    assert recovered.reason.startswith(f"{lost[0]} (stage 1) was lost")


async def test_after_a_restart_too_a_spare_takes_over_from_one_that_does_not_come_back(tmp_path: Path) -> None:
    """The coordinator knows of no speed and no link then, and asks nobody before it has them train; the state is on disks."""
    job = tiny_job(tmp_path, steps=400, plan={"stages": 2})
    names, state = ("a", "b", "c"), tmp_path / "state"
    async with coordinated(job, state, peers=0, min_peers=3) as run:
        join_with_disks(run, tmp_path, *names)
        await run.until(lambda: run.coordinator.status().HasField("safe_snapshot"))
        (plan,) = run.told(PlanEvent)
    (first,), (lost,) = (stage.peers for stage in plan.stages)
    (spare,) = set(names) - {first, lost}
    deadlines = Deadlines(settle_seconds=0.05, returning_seconds=1.0)
    async with coordinated(job, state, peers=0, min_peers=2, deadlines=deadlines) as run:
        join_with_disks(run, tmp_path, first, spare)
        await run.until_told(StepEvent)
    told = [event for event in run.events if isinstance(event, MeasurementEvent | PlanEvent)]
    assert isinstance(told[0], PlanEvent), told
    assert [stage.peers for stage in told[0].stages] == [(first,), (spare,)]
