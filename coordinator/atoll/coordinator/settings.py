"""What a coordinator is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from atoll.coordinator.identity.enrolment import LIFETIME
from atoll.coordinator.learning_rates import outer_schedule, schedule_of
from atoll.coordinator.run.deadlines import Deadlines
from atoll.coordinator.run.states import RunSettings
from atoll.coordinator.sessions.membership import LEASE_SECONDS
from atoll.coordinator.survey.survey_plan import SurveyLimits
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """``listen`` is HOST:PORT, port 0 for a free one; ``state`` the folder that holds all of the run; ``resume`` is where there
    are snapshots to go on from; ``chaos`` what a fault plan has this coordinator do. ``insecure``: plain text, for
    peers on this machine; ``certificate_lifetime`` is of peers' certificates."""

    job: Job
    listen: str
    state: Path
    min_peers: int = 1
    resume: str | None = None
    lease_seconds: float = LEASE_SECONDS
    deadlines: Deadlines = field(default_factory=Deadlines)
    survey: SurveyLimits = field(default_factory=SurveyLimits)
    chaos: FaultPoints = field(default_factory=FaultPoints, compare=False, repr=False)
    insecure: bool = False
    certificate_lifetime: timedelta = LIFETIME

    def run_settings(self) -> RunSettings:
        """What the state machine needs of it."""
        training, durability = self.job.training, self.job.durability
        return RunSettings(
            steps=training.steps,
            min_peers=max(self.min_peers, 1 if self.job.plan.stages == "auto" else self.job.plan.stages),
            largest_norm=training.clip_norm,
            evaluate_every=training.evaluate_every,
            evaluation_steps=training.evaluation_batches,
            evaluate_without_codecs=training.evaluate_without_codecs,
            snapshot_every=None if durability.snapshot_every == "auto" else durability.snapshot_every,
            copies=durability.copies,
            has_store=durability.store is not None,
            deadlines=self.deadlines,
            schedule=outer_schedule(self.job) or schedule_of(self.job),
        )
