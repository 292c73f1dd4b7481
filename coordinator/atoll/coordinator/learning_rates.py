"""From a job to learning rates and the optimizers they are for: of the steps, and of the inner ones within them. Pure."""

from __future__ import annotations

from atoll.coordinator.planning.segments import state_copies
from atoll.coordinator.run.schedule import LearningRateSchedule
from atoll.protocol.assignment import LocalSteps, OptimizerSettings
from atoll.protocol.ids import MicrobatchIndex, StepNumber
from atoll.protocol.job import Job


def schedule_of(job: Job) -> LearningRateSchedule:
    """The learning rate of each inner step, counted through all steps; where there are no local steps, of each step."""
    training, count = job.training, job.averaging.local_steps
    return LearningRateSchedule(
        highest=training.optimizer.learning_rate,
        steps=training.steps * count,
        warmup=training.schedule.warmup * count,
        decay=training.schedule.decay,
        final=training.schedule.final,
    )


def outer_schedule(job: Job) -> LearningRateSchedule | None:
    """The learning rate with which a step follows what its local steps came to; None where there are none."""
    averaging = job.averaging
    if averaging.local_steps == 1:
        return None
    return LearningRateSchedule(highest=averaging.outer_learning_rate, steps=job.training.steps)


class InnerRates:
    """The learning rate of each microbatch of a job with local steps."""

    def __init__(self, job: Job) -> None:
        self._schedule = schedule_of(job)
        self._count = job.averaging.local_steps
        self._num_microbatches = job.training.num_microbatches

    def of(self, step: StepNumber, microbatch: MicrobatchIndex) -> float:
        """That of the inner step which the microbatch belongs to."""
        inner = microbatch * self._count // self._num_microbatches
        return self._schedule.rate((step - 1) * self._count + inner + 1)


def optimizer_settings(job: Job) -> OptimizerSettings:
    """The job's optimizer as peers are told of it."""
    section = job.training.optimizer
    beta1, beta2 = section.betas
    return OptimizerSettings(
        name=section.name,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        nesterov=section.nesterov,
        beta1=beta1,
        beta2=beta2,
        epsilon=section.epsilon,
    )


def step_optimizer(job: Job) -> OptimizerSettings:
    """The one whose state lasts from step to step: the job's, with local steps the outer one."""
    if job.averaging.local_steps == 1:
        return optimizer_settings(job)
    momentum = job.averaging.outer_momentum
    return OptimizerSettings(name="sgd", momentum=momentum, nesterov=momentum > 0.0)


def local_steps(job: Job) -> LocalSteps | None:
    """The inner steps as peers are told of them."""
    count = job.averaging.local_steps
    return None if count == 1 else LocalSteps(count=count, optimizer=optimizer_settings(job))


def lasting_copies(job: Job) -> int:
    """Bytes of weights and of what outlasts a step beside them, for each byte of weights."""
    lasts = step_optimizer(job)
    return state_copies(lasts.name, lasts.momentum)


def held_copies(job: Job) -> int:
    """The same with all that there is room for during a step, but for one gradient."""
    if job.averaging.local_steps == 1:
        return lasting_copies(job)
    inner = job.training.optimizer
    return lasting_copies(job) + 1 + state_copies(inner.name, inner.momentum)  # one for the change
