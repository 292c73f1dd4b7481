"""Whole runs over real gRPC in one process: the coordinator, real peers, what is left in the state folder."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.coordinator.events import (
    EvaluationEvent,
    LinkEvent,
    PeerEvent,
    PlanEvent,
    PredictionEvent,
    RecoveredEvent,
    ReplayedEvent,
    RestoredEvent,
    StepEvent,
    VoidEvent,
)
from atoll.coordinator.run.deadlines import Deadlines
from atoll.coordinator.run.journal import JOURNAL, Journal
from atoll.coordinator.run_files import METRICS, TIME, WEIGHTS
from atoll.coordinator.server import Coordinator
from atoll.coordinator.settings import CoordinatorSettings
from atoll.peer.session.values import ExitCode
from atoll.peer.stage.arrivals import MicrobatchInput
from atoll.peer.stage.stage import Forwarded, Stage
from atoll.protocol.errors import JobError, ResourceError
from atoll.protocol.ids import StepNumber
from atoll.protocol.v1 import operator_pb2
from support.coordinated import coordinated, tiny_job
from support.reference import train_plainly


@pytest.mark.parametrize("num_peers", [1, 2, 4])
async def test_a_run_ends_with_the_weights_of_a_plain_loop(tmp_path: Path, num_peers: int) -> None:
    job = tiny_job(tmp_path, options={"tied": False}, plan={"stages": num_peers})
    async with coordinated(job, tmp_path / "state", peers=num_peers) as run:
        outcome = await run.ended()
        assert outcome.finished
        assert [(await run.peer_ended(f"peer-{index}")).exit_code for index in range(num_peers)] == [0] * num_peers
    plain = train_plainly(job, tmp_path / "cache")
    assert [event.loss for event in run.told(StepEvent)] == list(plain.losses)
    weights = load_file(tmp_path / "state" / WEIGHTS)
    assert weights.keys() == plain.state.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state.items())
    assert len(run.told(PlanEvent)[0].stages) == num_peers


async def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=10, evaluate_every=5, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state") as run:
        await run.ended()
    journal = Journal(tmp_path / "state" / JOURNAL)
    assert journal.losses() == [(event.step, event.loss) for event in run.told(StepEvent)]
    consumed = [one for step in range(1, 11) for ids in journal.sample_ids(StepNumber(step)) for one in ids]
    assert len(consumed) == 40
    assert len(set(consumed)) == 40
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "state" / METRICS).read_text().splitlines()]
    times = [line.pop(TIME) for line in lines]
    assert times == sorted(times)
    assert lines == [json.loads(event.to_json()) for event in run.events]
    assert [event.step for event in run.told(EvaluationEvent)] == [5, 10]
    compared = {event.what for event in run.told(PredictionEvent)}
    of_steps = {"step_seconds", "memory_bytes", "compute_seconds", "transfer_seconds"}
    assert of_steps <= compared <= of_steps | {"bytes_per_second"}
    ways = {(event.source, event.direction) for event in run.told(LinkEvent)}
    (first,), (second,) = (stage.peers for stage in run.told(PlanEvent)[0].stages)
    assert ways == {(first, "forward"), (first, "backward"), (second, "backward")}
    states = [event.state for event in run.told(PeerEvent) if event.name == "peer-0"]
    assert states[:3] == ["joined", "loading", "ready"]


async def test_nothing_is_left_running(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    async with coordinated(tiny_job(tmp_path, steps=1), tmp_path / "state") as run:
        await run.ended()
    ours = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("atoll-coordinator")]
    assert ours == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_run_starts_from_given_weights(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=1)
    async with coordinated(job, tmp_path / "first") as run:
        await run.ended()
    given = load_file(tmp_path / "first" / WEIGHTS)
    given = {name: torch.full_like(tensor, 0.01) for name, tensor in given.items()}
    save_file(given, tmp_path / "given.safetensors")
    again = tiny_job(
        tmp_path, steps=1, optimizer={"learning_rate": 1e-12}, model={"weights": str(tmp_path / "given.safetensors")}
    )
    async with coordinated(again, tmp_path / "second") as run:
        await run.ended()
    trained = load_file(tmp_path / "second" / WEIGHTS)
    assert all(torch.allclose(trained[name], tensor, atol=1e-6) for name, tensor in given.items())


async def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_file({"token_embedding.weight": torch.zeros(3, 3)}, tmp_path / "given.safetensors")
    job = tiny_job(tmp_path, model={"weights": str(tmp_path / "given.safetensors")})
    async with coordinated(job, tmp_path / "state", peers=1) as run:
        with pytest.raises(JobError, match=r"model\.weights: token_embedding\.weight is \(3, 3\) in"):
            await run.ended()


async def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=1)
    async with coordinated(job, tmp_path / "state") as run:
        second = Coordinator(CoordinatorSettings(job=job, listen="127.0.0.1:0", state=tmp_path / "state"))
        with pytest.raises(JobError, match=r"--state: .* is used by a run in process"):
            await second.start()
        await run.ended()
    third = Coordinator(CoordinatorSettings(job=job, listen="127.0.0.1:0", state=tmp_path / "state"))
    with pytest.raises(JobError, match=r"holds a finished run \(tiny, 1 steps\).*give another --state"):
        await third.start()


async def test_a_port_in_use_is_a_sentence_and_the_folder_stays_free(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=1)
    async with coordinated(job, tmp_path / "first", peers=0) as run:
        second = Coordinator(CoordinatorSettings(job=job, listen=run.address, state=tmp_path / "state"))
        with pytest.raises(ResourceError, match=r"is in use.*--listen"):
            await second.start()
    async with coordinated(job, tmp_path / "state", peers=1) as run:
        assert (await run.ended()).finished


async def test_the_operator_sees_and_stops_a_run_and_keeps_its_weights(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=10_000, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state") as run, run.operator() as operator:
        await run.until_told(StepEvent, step=2)
        status = await operator.Status(operator_pb2.StatusRequest())
        assert (status.run, status.state, status.steps) == ("tiny", "training", 10_000)
        assert status.step >= 2
        assert [peer.stage for peer in status.peers] == [0, 1]
        assert status.peers[0].layers.startswith("token_embedding - ")
        exported = await operator.Export(operator_pb2.ExportRequest())
        assert exported.path == str(tmp_path / "state" / f"weights-step-{exported.step}.safetensors")
        assert load_file(exported.path).keys() >= {"token_embedding.weight"}
        await operator.Stop(operator_pb2.StopRequest(reason="enough"))
        outcome = await run.ended()
        assert (outcome.finished, outcome.stopped) == (False, True)
        assert outcome.reason.startswith("enough, after step ")
        assert (await run.peer_ended("peer-0")).exit_code == ExitCode.FINISHED
    assert (tmp_path / "state" / WEIGHTS).exists()


async def test_an_interrupt_ends_a_run_within_seconds(tmp_path: Path) -> None:
    async with coordinated(tiny_job(tmp_path, steps=10_000), tmp_path / "state") as run:
        await run.until_told(StepEvent, step=1)
        run.coordinator.request_stop("interrupted by SIGINT")
        async with asyncio.timeout(5):
            assert (await run.ended()).reason == "interrupted by SIGINT"
            assert "interrupted by SIGINT" in (await run.peer_ended("peer-1")).reason


async def test_a_model_that_does_not_fit_says_by_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.peer.measuring.profile.free_memory_bytes", lambda device: 100_000)
    deadlines = Deadlines(settle_seconds=0.05, waiting_seconds=5.0)
    async with coordinated(tiny_job(tmp_path), tmp_path / "state", peers=0, min_peers=1, deadlines=deadlines) as run:
        run.join("small")
        outcome = await run.ended()
        assert outcome.reason.startswith("the model does not fit: ")
        assert "more memory needed (stage 0 needs " in outcome.reason


async def test_a_full_disk_is_one_sentence_and_a_failed_run(tmp_path: Path) -> None:
    async with coordinated(tiny_job(tmp_path, steps=10_000), tmp_path / "state") as run:
        await run.until_told(StepEvent, step=1)
        folder = run.coordinator._folder
        assert folder is not None
        connection = folder.journal._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        outcome = await run.ended()
    assert outcome.reason == f"the disk that holds {tmp_path / 'state'} is full: free some space or give another --state"


async def test_a_nan_in_one_stage_voids_the_step_everywhere_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Stage.forward
    poisoned: list[int] = []

    def poison_once(self: Stage, microbatch: MicrobatchInput) -> Forwarded:
        if self.graph.stage == 1 and microbatch.step == 2 and not poisoned:
            poisoned.append(microbatch.index)
            received = {value: tensor * float("nan") for value, tensor in microbatch.received.items()}
            microbatch = dataclasses.replace(microbatch, received=received)
        return forward(self, microbatch)

    monkeypatch.setattr(Stage, "forward", poison_once)
    job = tiny_job(tmp_path, options={"tied": False}, plan={"stages": 2})
    async with coordinated(job, tmp_path / "state") as run:
        assert (await run.ended()).finished
    void = run.told(VoidEvent)[0]
    assert (void.step, void.peer, void.stage) == (2, *run.told(PlanEvent)[0].stages[1].peers, 1)
    assert "stage 1" in void.reason
    assert "at step 2" in void.reason
    plain = train_plainly(job, tmp_path / "cache")
    assert [event.loss for event in run.told(StepEvent)] == list(plain.losses)
    weights = load_file(tmp_path / "state" / WEIGHTS)
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state.items())


async def test_a_run_that_blows_up_ends_after_three_void_steps_and_says_why(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, optimizer={"name": "sgd", "learning_rate": 1e30}, clip_norm=None)
    async with coordinated(job, tmp_path / "state") as run:
        outcome = await run.ended()
    assert "was void 3 times in a row, seen first by peer-" in outcome.reason
    assert "the training diverges, which no peer is to blame for: lower training.optimizer.learning_rate" in outcome.reason
    assert [event.step for event in run.told(VoidEvent)] == [2, 2, 2]


async def test_a_killed_peer_leads_back_to_the_first_values_and_changes_nothing_and_a_spare_is_only_noted(
    tmp_path: Path,
) -> None:
    job = tiny_job(tmp_path, steps=30, plan={"stages": 2}, options={"tied": False}, evaluate_every=10)
    async with coordinated(job, tmp_path / "state", peers=3) as run:
        await run.until_told(StepEvent, step=1)
        _, (last,) = (stage.peers for stage in run.told(PlanEvent)[0].stages)
        (spare,) = {event.name for event in run.told(PeerEvent) if event.state == "spare"}
        run.kill(spare)
        await run.until_told(PeerEvent, name=spare, state="lost")
        seen = run.told(StepEvent)[-1].step
        await run.until(lambda: run.told(StepEvent)[-1].step > seen)
        run.kill(last)
        run.join("newcomer")
        assert (await run.ended()).finished
    (restored,) = run.told(RestoredEvent)
    assert restored.reason.startswith(f"{last} (stage 1) was lost (its connection ")
    assert (restored.step, restored.bytes) == (0, 0)
    assert [event.step for event in run.told(ReplayedEvent)] == list(range(1, restored.from_step + 1))
    assert all(event.equal for event in run.told(ReplayedEvent))
    (recovered,) = run.told(RecoveredEvent)
    assert (recovered.step, recovered.replayed_steps) == (restored.from_step + 1, restored.from_step)
    plain = train_plainly(job, tmp_path / "cache")
    assert [event.loss for event in run.told(StepEvent)] == list(plain.losses)
    assert [event.step for event in run.told(EvaluationEvent)] == [10, 20, 30]
    weights = load_file(tmp_path / "state" / WEIGHTS)
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state.items())
