"""Events of a run with the fields that a test does not care about filled in."""

from __future__ import annotations

from atoll.coordinator.events import PlanEvent, StageSummary, StepEvent


def step_event(step: int, *, loss: float = 3.5, tokens: int = 1024, seconds: float = 2.0) -> StepEvent:
    """A committed step."""
    return StepEvent(
        step=step,
        loss=loss,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        learning_rate=1e-3,
        grad_norm=1.0,
        generation=1,
        samples="ab12",
    )


def plan_event(*peers: str) -> PlanEvent:
    """A plan with one stage for each of ``peers``."""
    stages = tuple(
        StageSummary(
            stage=number,
            peers=(peer,),
            first=f"blocks.{number}",
            last=f"blocks.{number}.mlp",
            parameters=1_500_000,
            predicted_memory_bytes=64 * 1024 * 1024,
        )
        for number, peer in enumerate(peers)
    )
    return PlanEvent(generation=1, stages=stages, predicted_step_seconds=1.5)
