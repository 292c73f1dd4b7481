"""The cycle of steps under a plan: start, reports, commit or void. A part of the state machine; pure.

A step is a transaction. Its batches go out, the stages are started, each stage reports when it has all its gradients. With
all reports here and finite the commit is written, then sent; the next step starts with the same breath, on batches that went
out while this one ran. Anything else voids the step: the generation grows, every stage drops what it did and answers, and the
step runs again.

After a run went back to a snapshot it does steps again that the journal has: these are compared with it, not written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from atoll.coordinator.events import EvaluationEvent, StepEvent, VoidEvent
from atoll.coordinator.run.context import RunContext
from atoll.coordinator.run.deadlines import StepTimer
from atoll.coordinator.run.events import BatchPrepared, PeerVoided, StageReported
from atoll.coordinator.run.instructions import CheckReplay, SendBatches, SendCommit, SendVoid, StartStep, WriteCommit
from atoll.coordinator.run.reckoning import Blame, StepOutcome
from atoll.coordinator.run.recovery import Recovery
from atoll.coordinator.run.snapshotting import Snapshotting
from atoll.coordinator.run.states import Phase
from atoll.coordinator.run.step import OpenStep
from atoll.protocol.ids import PeerId, StepNumber

CURE_NOT_FINITE = (
    "; the training diverges, which no peer is to blame for: lower training.optimizer.learning_rate or set training.clip_norm"
)


class StepCycle:
    """``between_steps`` is called when a step or an evaluation is done and decides what comes next."""

    def __init__(
        self, context: RunContext, recovery: Recovery, snapshotting: Snapshotting, between_steps: Callable[[], None]
    ) -> None:
        self._context = context
        self._recovery = recovery
        self._snapshotting = snapshotting
        self._between_steps = between_steps
        self._batches: dict[tuple[StepNumber, bool], BatchPrepared] = {}
        self._batches_sent = StepNumber(0)
        self._timer = StepTimer(context.settings.deadlines)
        self._evaluation_timer = StepTimer(context.settings.deadlines)
        self.trainable: tuple[str, ...] | None = None
        self.open: OpenStep | None = None
        self.voids_in_a_row = 0
        self.loss: float | None = None
        self.tokens_per_second = 0.0
        self.num_tokens = 0
        self.void_reason = ""
        self.owed_evaluation = False
        self._owed_before = False
        self._evaluation: EvaluationEvent | None = None
        self._last_evaluation = StepNumber(0)

    def begin_next(self) -> None:
        """Start the step after the last committed one, after an evaluation that is still owed."""
        committed = self._context.committed
        owed, self.owed_evaluation = self.owed_evaluation, False
        self.begin(committed if owed else StepNumber(committed + 1), evaluation=owed)

    def begin(self, step: StepNumber, *, evaluation: bool = False) -> None:
        """Start ``step``, or the evaluation that follows it; its second part once the first is done."""
        context = self._context
        assert context.plan is not None
        exact = evaluation and self._evaluation is not None
        self.open = OpenStep(step, context.generation, context.plan, evaluation=evaluation, started=context.now)
        if evaluation:
            context.emit(SendBatches(generation=context.generation, step=step, evaluation=True))
        else:
            self._send_batches_to(step)
        context.emit(StartStep(generation=context.generation, step=step, evaluation=evaluation, without_codecs=exact))
        if not evaluation:
            self._send_batches_to(StepNumber(step + 1))
        timer, size = (self._evaluation_timer, context.settings.evaluation_steps) if evaluation else (self._timer, 1)
        phase = Phase.EVALUATION if evaluation else Phase.STEP
        context.enter_phase(phase, timer.limit(context.plan.step_seconds * size))

    def new_generation(self) -> None:
        """Batches that went out belong to an older generation; no peer has them any more."""
        self._batches_sent = self._context.committed

    def batch_prepared(self, event: BatchPrepared) -> None:
        self._batches[event.step, event.evaluation] = event
        self._consider()

    def reported(self, report: StageReported) -> None:
        if self.open is not None and self._context.phase.open:
            self.open.add(report)
            self._consider()

    def announce_void(self, reason: str, peer: PeerId | None) -> None:
        """Tell that the open step is void, if there is one."""
        context = self._context
        if self.open is not None and context.phase.open:
            context.announce(VoidEvent(step=self.open.step, reason=reason, peer=peer or "", stage=context.stage_of(peer)))

    def void(self, reason: str, peer: PeerId | None, cure: str = "", *, counts: bool = True) -> None:
        """Drop the open step everywhere because of ``peer``; it begins again when all have answered. Where that ``counts``, too
        many of them end the run."""
        context = self._context
        assert context.plan is not None
        assert self.open is not None
        step = self.open.step
        self.announce_void(reason, peer)
        self.voids_in_a_row += int(counts)
        if counts and self.voids_in_a_row >= context.settings.max_voids:
            # What is not finite is seen by some stage first, which need not be where it comes from.
            begins = "seen first by" if cure == CURE_NOT_FINITE else "because of"
            whose = f"{begins} {context.described(peer)}: " if peer is not None else ""
            what = "the evaluation after step" if self.open.evaluation else "step"
            context.fail(f"{what} {step} was void {self.voids_in_a_row} times in a row, {whose}{reason}{cure}")
            return
        self.void_reason = reason
        self.send_void(context.plan.peers, reason)
        context.enter_phase(Phase.VOIDING, context.settings.deadlines.voiding_seconds, context.plan.peers)

    def send_void(self, peers: tuple[PeerId, ...], reason: str) -> None:
        """Have ``peers`` drop what they do, under a new generation."""
        context = self._context
        old, step = context.generation, self.open.step if self.open is not None else context.committed
        context.grow_generation()
        self.new_generation()
        context.emit(SendVoid(generation=old, step=step, next_generation=context.generation, reason=reason, peers=peers))

    def abandon(self) -> None:
        """The plan is over: the open step begins again under the next one, and so does an evaluation."""
        self.owed_evaluation = self.open is not None and self.open.evaluation
        self.open = None

    def went_back(self) -> None:
        """The next step is not the one after the last that was done; an evaluation that is owed is due when that comes."""
        self._owed_before |= self.owed_evaluation
        self.owed_evaluation = False
        self._evaluation = None
        self.voids_in_a_row = 0

    def returned(self) -> None:
        """The run did not have to go back after all."""
        self.owed_evaluation, self._owed_before = self._owed_before, False

    def loads(self) -> None:
        """What the run stands at now is what it goes on from."""
        self._owed_before = False

    def voided(self, event: PeerVoided) -> None:
        context = self._context
        if context.phase is not Phase.VOIDING or event.generation != context.generation:
            return
        context.pending.discard(event.peer)
        if not context.pending:
            assert self.open is not None
            self.begin(self.open.step, evaluation=self.open.evaluation)

    def _send_batches_to(self, last: StepNumber) -> None:
        """Have the batches of all steps up to ``last`` sent, each once a generation."""
        context = self._context
        while self._batches_sent < min(last, context.settings.steps):
            self._batches_sent = StepNumber(self._batches_sent + 1)
            context.emit(SendBatches(generation=context.generation, step=self._batches_sent, evaluation=False))

    def _consider(self) -> None:
        if self.open is None or not self._context.phase.open or self.open.missing:
            return
        batch = self._batches.get((self.open.step, self.open.evaluation))
        if batch is None:
            return
        outcome = self.open.outcome(batch, self.trainable or (), self._context.settings.largest_norm)
        if isinstance(outcome, Blame):
            self.void(outcome.reason, outcome.peer, CURE_NOT_FINITE)
        elif self.open.evaluation:
            self._evaluated(self.open, outcome)
        else:
            self._commit(self.open, outcome, batch)

    def _commit(self, step: OpenStep, outcome: StepOutcome, batch: BatchPrepared) -> None:
        context = self._context
        if step.step != context.committed + 1:
            raise AssertionError(context.tell(f"step {step.step} commits after step {context.committed}"))
        commit = self._commit_record(step, outcome, batch)
        again = context.replaying
        context.emit(CheckReplay(commit=commit) if again else commit)
        releases = context.stand_at(step.step)
        context.last = commit.without_samples()
        self._count(commit, again=again)
        snapshot = self._snapshotting.begin_if_due(commit.seconds, self._timer.usual)
        context.emit(
            SendCommit(
                peers=step.peers,
                generation=commit.generation,
                step=commit.step,
                clip_factor=commit.clip_factor,
                learning_rate=commit.learning_rate,
                snapshot=snapshot,
            ),
            *releases,
        )
        if self._evaluation_is_due(step.step):
            self.begin(step.step, evaluation=True)
        else:
            self._close()
        # Last, for the next step must not wait for whoever listens.
        if not again:
            context.announce(self._step_event(commit, outcome))
        self._recovery.committed(again=again)

    def _evaluation_is_due(self, step: StepNumber) -> bool:
        """After ``step``; steps that are done again have had theirs."""
        settings = self._context.settings
        if settings.evaluate_every is None or step <= self._last_evaluation:
            return False
        return step % settings.evaluate_every == 0 or step == settings.steps

    def _commit_record(self, step: OpenStep, outcome: StepOutcome, batch: BatchPrepared) -> WriteCommit:
        return WriteCommit(
            generation=step.generation,
            step=step.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            clip_factor=outcome.clip_factor,
            learning_rate=self._context.settings.schedule.rate(step.step),
            seconds=self._context.now - step.started,
            num_tokens=batch.num_tokens,
            samples=batch.samples,
            sample_ids=batch.sample_ids,
        )

    def _count(self, commit: WriteCommit, *, again: bool) -> None:
        if not again:
            self.loss = commit.loss
            self.num_tokens += commit.num_tokens
        self.tokens_per_second = commit.num_tokens / commit.seconds if commit.seconds > 0 else 0.0
        self.voids_in_a_row = 0
        self._timer.observe(commit.seconds)
        self._recovery.step_seconds = self._timer.usual
        self._batches = {key: value for key, value in self._batches.items() if key[0] > commit.step}

    def _step_event(self, commit: WriteCommit, outcome: StepOutcome) -> StepEvent:
        return StepEvent(
            step=commit.step,
            loss=commit.loss,
            tokens=commit.num_tokens,
            tokens_per_second=self.tokens_per_second,
            seconds=commit.seconds,
            learning_rate=commit.learning_rate,
            grad_norm=commit.grad_norm,
            generation=commit.generation,
            samples=commit.samples,
            metrics=outcome.metrics,
        )

    def _evaluated(self, step: OpenStep, outcome: StepOutcome) -> None:
        self._evaluation_timer.observe(self._context.now - step.started)
        self._batches.pop((step.step, True), None)
        self.voids_in_a_row = 0
        first, self._evaluation = self._evaluation, None
        if first is None:
            event = EvaluationEvent(step=step.step, loss=outcome.loss, metrics=outcome.metrics)
            if self._context.settings.evaluate_without_codecs:
                self._evaluation = event
                self.begin(step.step, evaluation=True)
                return
        else:
            event = dataclasses.replace(first, loss_without_codecs=outcome.loss)
        self._last_evaluation = step.step
        self._close()
        self._context.announce(event)

    def _close(self) -> None:
        self.open = None
        self._context.leave_phase()
        self._between_steps()
