"""The operator's questions to a running swarm."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from support.swarm import local_swarm, run_command, write_job
from support.waiting import assert_eventually

pytestmark = pytest.mark.system


async def test_status_peers_export_and_stop_of_a_running_swarm(tmp_path: Path) -> None:
    state = tmp_path / "state"
    job = write_job(tmp_path, training={"steps": 100_000, "evaluate_every": None}, plan={"stages": 2})
    async with local_swarm(job, state, peers=2) as swarm:
        await swarm.event("step", step=1)
        address = json.loads((state / "address.json").read_text())["address"]

        answer: dict[str, Any] = {}

        async def is_training() -> bool:
            status = await run_command("status", address, "--state", state, "--json")
            answer.update(json.loads(status.output))
            return bool(answer["state"] == "training")  # on a busy machine the plan may be changing at this moment

        check: Callable[[], bool | Awaitable[bool]] = is_training
        await assert_eventually(check, within_seconds=60.0)
        assert (answer["event"], answer["steps"]) == ("status", 100_000)
        assert len(answer["links"]) == 2
        assert answer["predicted_step_seconds"] > 0.0
        assert answer["step"] >= 1
        assert {peer["name"] for peer in answer["peers"]} == {"peer-1", "peer-2"}
        for_people = await run_command("status", "--state", state)
        assert "step" in for_people.output
        assert "peer-2" in for_people.output

        peers = await run_command("peers", state, "--json")
        rows = [json.loads(line) for line in peers.output.splitlines()]
        assert [row["stage"] for row in rows] == [0, 1]
        assert all(row["resident_bytes"] > 0 and row["layers"] for row in rows)

        copy = tmp_path / "copy.safetensors"
        export = await run_command("export", address, "--state", state, "--output", copy, "--json")
        assert export.status == 0, export.errors
        assert json.loads(export.output)["step"] >= 1
        with safe_open(copy, framework="pt") as weights:
            assert "token_embedding.weight" in weights.keys()  # noqa: SIM118 (no mapping)

        stop = await run_command("stop", address, "--state", state, "--reason", "enough")
        assert stop.status == 0, stop.errors
        assert await swarm.ended(within_seconds=20.0) == 0, "what was asked for is no failure"
        assert swarm.left() == []
        assert swarm.events[-1]["event"] == "stopped"
        assert "enough" in swarm.events[-1]["reason"]
        for name in ("peer-1", "peer-2"):
            assert "the run was stopped: enough" in (state / "logs" / f"{name}.log").read_text()

    late = await run_command("status", state)
    assert late.status == 1
    assert "no coordinator answers" in late.errors


async def test_the_folder_of_a_finished_run_answers_without_a_coordinator(tmp_path: Path) -> None:
    state, copy = tmp_path / "state", tmp_path / "copy.safetensors"
    job = write_job(tmp_path, training={"steps": 1, "evaluate_every": None})
    async with local_swarm(job, state, peers=1) as swarm:
        assert await swarm.ended() == 0
    export = await run_command("export", state, "--output", copy)
    assert export.status == 0, export.errors
    assert copy.read_bytes() == (state / "weights.safetensors").read_bytes()

    report = await run_command("report", state, "--json")
    assert json.loads(report.output)["losses"] == [[1, swarm.events[-1]["loss"]]]
    text = await run_command("generate", state, "--prompt", "12 times", "--length", "20")
    assert text.status == 0, text.errors
    assert text.output.startswith("12 times")

    again = await run_command("swarm", job, "--state", state, "--peers", "1")
    assert again.status == 2
    assert str(state) in again.errors.splitlines()[-1]
    assert copy.read_bytes() == (state / "weights.safetensors").read_bytes()
