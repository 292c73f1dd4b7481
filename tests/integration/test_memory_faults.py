"""A peer that runs out of memory in the middle of a run: it gets less to do, the run lives, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atoll.coordinator.events import MovedEvent, PlanEvent, StepEvent, VoidEvent
from atoll.peer.stage.stage import Forwarded, MicrobatchInput, Stage
from atoll.protocol.job import Job
from atoll.protocol.limits import Limits
from support.coordinated import Coordinated, coordinated
from support.jobs import TOKENS, gpt_job
from support.marks import release
from support.runs import assert_same

Failing = Callable[[Stage, MicrobatchInput], None]
AT_STEP = 4


def ask_for_too_much(stage: Stage, microbatch: MicrobatchInput) -> None:
    """What happens on a machine whose memory others have taken: torch's allocator fails."""
    torch.empty(2**50, dtype=torch.uint8)


def lower_the_limit(stage: Stage, microbatch: MicrobatchInput) -> None:
    """The peer may use less than it thought: what arrives is beyond its limits."""
    stage._arrivals._limits = Limits(max_tensor_bytes=64)
    stage._arrivals._fitting.clear()


def job(base: Path) -> Job:
    job = gpt_job(base, steps=8, evaluate_every=4, data={**TOKENS, "validation": 0.05})
    return job.model_copy(update={"plan": job.plan.model_copy(update={"stages": 2})})


async def train(folder: Path, base: Path) -> Coordinated:
    async with coordinated(job(base), folder, peers=3) as run:
        outcome = await run.ended()
    assert outcome.finished, outcome.reason
    return run


@pytest.mark.parametrize("fail", [ask_for_too_much, release(lower_the_limit)], ids=lambda fail: fail.__name__)
@pytest.mark.parametrize("evaluation", [False, True], ids=["step", "evaluation"])
async def test_a_peer_out_of_memory_gets_less_and_the_run_lives(
    fail: Failing, evaluation: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = await train(tmp_path / "still", tmp_path)
    forward = Stage.forward
    failed: list[Stage] = []

    def fail_once(self: Stage, microbatch: MicrobatchInput) -> Forwarded:
        due = microbatch.step == AT_STEP and microbatch.index == 1 and microbatch.evaluation == evaluation
        if self.graph.stage == 1 and due and not failed:
            failed.append(self)
            fail(self, microbatch)
        return forward(self, microbatch)

    monkeypatch.setattr(Stage, "forward", fail_once)
    disturbed = await train(tmp_path / "disturbed", tmp_path)
    assert_same(disturbed, still)
    (void,) = disturbed.told(VoidEvent)
    assert (void.step, void.stage) == (AT_STEP, 1)
    before, after = disturbed.told(PlanEvent)
    needs = [
        {peer: stage.predicted_memory_bytes for stage in event.stages for peer in stage.peers} for event in (before, after)
    ]
    assert needs[1].get(void.peer, 0) <= 0.8 * needs[0][void.peer]
    (moved,) = disturbed.told(MovedEvent)
    assert moved.step == AT_STEP - (0 if evaluation else 1)
    assert moved.bytes > 0
    assert f"{void.peer} (stage 1) ran out of memory" in moved.reason


async def test_before_the_first_commit_it_is_planned_anew_from_the_first_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = await train(tmp_path / "still", tmp_path)
    forward = Stage.forward
    failed: list[Stage] = []

    def fail_once(self: Stage, microbatch: MicrobatchInput) -> Forwarded:
        if self.graph.stage == 1 and not failed:
            failed.append(self)
            ask_for_too_much(self, microbatch)
        return forward(self, microbatch)

    monkeypatch.setattr(Stage, "forward", fail_once)
    disturbed = await train(tmp_path / "disturbed", tmp_path)
    assert_same(disturbed, still)
    first_step = disturbed.events.index(disturbed.told(StepEvent)[0])
    before = [event for event in disturbed.events[:first_step] if isinstance(event, PlanEvent | MovedEvent)]
    assert [type(event) for event in before] == [PlanEvent, PlanEvent], "a better plan may follow, no state moves before"
    assert disturbed.told(StepEvent)[0].generation > 1
