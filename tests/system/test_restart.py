"""The coordinator is killed with SIGKILL and started again on the same folder: the peers come back, and the run ends as the
undisturbed one does, bit for bit."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.coordinator.cli.invite import invite_for_swarm
from atoll.coordinator.cli.state import read_address
from atoll.protocol.chaos import COORDINATOR, Fault
from atoll.protocol.fault_points import VARIABLE, Armed
from support.command import Command, started
from support.marks import release
from support.swarm import SWARM_SECONDS, write_job
from support.waiting import assert_eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

PEERS = ("peer-1", "peer-2")
STEPS = 8
FROZEN_SECONDS = 60.0
JOB: dict[str, dict[str, Any]] = {
    "model": {"builtin": "gpt", "options": {"layers": 2, "width": 32, "heads": 2, "context": 32, "dropout": 0.1}},
    "training": {"steps": STEPS, "batch": 4, "microbatch": 1, "evaluate_every": 4},
    "plan": {"stages": 2},
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Run:
    """A job, its folder, its coordinator, started as often as it takes, and its peers; ``insecure``: without TLS."""

    def __init__(self, folder: Path, stack: AsyncExitStack, job: dict[str, dict[str, Any]], *, insecure: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.state = folder / "state"
        self.address = f"127.0.0.1:{free_port()}"
        self.job = write_job(folder, **job)
        self._stack = stack
        self._insecure = ("--insecure",) if insecure else ()
        self._tokens: dict[str, str] = {}

    async def coordinate(self, **variables: str) -> Command:
        words = ("run", self.job, "--listen", self.address, "--state", self.state, "--min-peers", str(len(PEERS)), "--json")
        words = (*words, *self._insecure)
        return await self._stack.enter_async_context(started("atoll.coordinator", *words, variables=variables))

    async def join(self, name: str) -> Command:
        words = ("join", self.address, "--name", name, "--threads", "1", "--cache", self.folder / "cache")
        if not self._insecure and name not in self._tokens:
            await assert_eventually(lambda: read_address(self.state) is not None, within_seconds=SWARM_SECONDS)
            self._tokens[name] = invite_for_swarm(self.state)
        variables = {} if self._insecure else {"ATOLL_TOKEN": self._tokens[name]}
        return await self._stack.enter_async_context(started("atoll.peer", *words, *self._insecure, variables=variables))

    def lines(self, *kinds: str) -> list[dict[str, Any]]:
        """What the folder tells of events of these kinds, over all coordinators."""
        lines = [json.loads(line) for line in (self.state / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] in kinds]

    def ledger(self) -> list[tuple[int, int, bytes]]:
        connection = sqlite3.connect(self.state / "journal.sqlite")
        rows = connection.execute("SELECT step, microbatch, sample_ids FROM ledger ORDER BY step, microbatch").fetchall()
        connection.close()
        return rows


@asynccontextmanager
async def prepared(folder: Path, *, insecure: bool = False, **training: Any) -> AsyncIterator[Run]:
    async with AsyncExitStack() as stack:
        yield Run(folder, stack, {**JOB, "training": {**JOB["training"], **training}}, insecure=insecure)


async def finish(run: Run, coordinator: Command, peers: list[Command]) -> None:
    """To the end, with everybody's blessing."""
    await coordinator.event("finished")
    assert await coordinator.ended() == 0
    assert [await peer.ended() for peer in peers] == [0] * len(peers)


async def without_a_fault(folder: Path) -> Run:
    async with prepared(folder) as run:
        coordinator = await run.coordinate()
        await finish(run, coordinator, [await run.join(name) for name in PEERS])
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return asyncio.run(without_a_fault(tmp_path_factory.mktemp("undisturbed")))


def assert_same(run: Run, other: Run) -> None:
    """The same losses, norms, rates, samples, evaluations and weights, bit for bit, and each sample as often."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "samples", "tokens")
    for kind, names in (("step", keys), ("evaluation", ("step", "loss"))):
        told, expected = ([[line[name] for name in names] for line in one.lines(kind)] for one in (run, other))
        assert told == expected
    assert run.ledger() == other.ledger()
    weights, right = (load_file(one.state / "weights.safetensors") for one in (run, other))
    assert weights.keys() == right.keys()
    assert [name for name in right if not torch.equal(weights[name], right[name])] == []


def armed(folder: Path, *places: tuple[str, int | None]) -> dict[str, str]:
    """The variables of a coordinator that kills itself once at each of these phases and steps."""
    folder.mkdir()
    faults = {
        number: Fault.model_validate({"fault": "kill", "peer": COORDINATOR, "phase": phase, "step": step})
        for number, (phase, step) in enumerate(places)
    }
    return {VARIABLE: Armed(process=COORDINATOR, fired=folder, faults=faults).to_json()}


async def until_it_ends_by_itself(run: Run, coordinator: Command, variables: dict[str, str]) -> tuple[Command, int]:
    """Start the coordinator again whenever it was killed; the last one, and how often that was."""
    for kills in range(10):
        status = await coordinator.ended()
        if status != -signal.SIGKILL:
            return coordinator, kills
        coordinator = await run.coordinate(**variables)
    raise AssertionError("the coordinator is killed without end")


def assert_plans_were_kept(run: Run) -> None:
    """A coordinator that took the run up asked nobody to measure anything before it had its peers go on as they were."""
    told = run.lines("measurement", "resumed", "plan")
    first = next(event["stages"] for event in told if event["event"] == "plan")
    for index, event in enumerate(told):
        if event["event"] == "resumed" and "takes the run up" in event["reason"]:
            assert (told[index + 1]["event"], told[index + 1].get("stages")) == ("plan", first)


@pytest.mark.parametrize(
    ("places", "insecure"),
    [
        ([("waiting for commit", 3), ("committing", 5)], False),
        release([("loading", 1), ("forward", 2), ("backward", 3), ("committing", STEPS)], False),
        release([("backward", 3), ("committing", 5)], True),
    ],
)
async def test_a_coordinator_that_is_killed_at_a_phase(
    tmp_path: Path, undisturbed: Run, places: list[tuple[str, int | None]], insecure: bool
) -> None:
    """Between the commit in the journal and the peers that are to hear of it, among others; with TLS and without."""
    async with prepared(tmp_path, insecure=insecure) as run:
        variables = armed(tmp_path / "fired", *places)
        coordinator = await run.coordinate(**variables)
        peers = [await run.join(name) for name in PEERS]
        coordinator, kills = await until_it_ends_by_itself(run, coordinator, variables)
        assert kills == len(places)
        assert await coordinator.ended() == 0
        assert [await peer.ended() for peer in peers] == [0] * len(peers)
        assert not [line for peer in peers for line in peer.lines if "Traceback" in line]
        assert_same(run, undisturbed)
        assert_plans_were_kept(run)


async def test_a_finished_run_and_another_job_are_refused(undisturbed: Run) -> None:
    async with AsyncExitStack() as stack:
        words = ("run", undisturbed.job, "--state", undisturbed.state)
        again = await stack.enter_async_context(started("atoll.coordinator", *words))
        other = await stack.enter_async_context(started("atoll.coordinator", *words, "--set", "training.steps=9"))
        assert (await again.ended(), await other.ended()) == (2, 2)
        assert "holds a finished run" in again.lines[-1]
        assert "weights.safetensors" in again.lines[-1]


@pytest.mark.release
@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_a_peer_that_was_taken_for_lost_or_is_started_again_is_in_the_run_again(tmp_path: Path, how: str) -> None:
    """One that stood still for a minute, well beyond its lease, does so by itself; the other under the name that it had."""
    async with prepared(tmp_path, steps=10**6, evaluate_every=None) as run:
        coordinator = await run.coordinate()
        peers = {name: await run.join(name) for name in (*PEERS, "peer-3")}
        await coordinator.event("step", step=2)
        stages = (await coordinator.event("plan"))["stages"]
        victim = stages[-1]["peers"][0]
        peers[victim].signal(signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
        if how == "frozen":
            thaws = asyncio.get_running_loop().time() + FROZEN_SECONDS
            await coordinator.event("peer", name=victim, state="lost")
            coordinator.forget()
            went_on = (await coordinator.event("step"))["step"]
            await coordinator.event("step", step=went_on + 5)
            await asyncio.sleep(thaws - asyncio.get_running_loop().time())
            coordinator.forget()
            peers[victim].signal(signal.SIGCONT)
        else:
            coordinator.forget()
            peers[victim] = await run.join(victim)
        await coordinator.event("peer", name=victim, state="joined")
        lost_at = (await coordinator.event("step"))["step"]
        await coordinator.event("step", step=lost_at + 5)
        if how == "frozen":
            await peers[victim].says("looking for the coordinator")
            await peers[victim].says("back in the run")
