"""`atoll swarm` from start to summary, as processes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open

from support.swarm import local_swarm, run_command, started_swarm, write_job

pytestmark = pytest.mark.system

MEMORY = 1_000_000_000
FLEET = f"""
peers:
  - {{name: attic, threads: 1, memory: {MEMORY}, upload: 200Mbps}}
  - {{name: cellar, threads: 1, memory: {MEMORY}, rtt: 20ms}}
"""
FACTORY = """
import os
from pathlib import Path

from atoll.coordinator.models.gpt import GPT

with Path(__file__).with_name("importers").open("a") as importers:
    importers.write(f"{os.getpid()}\\n")


def make():
    return GPT(layers=2, width=32, heads=2, context=32)
"""

LOG_IMPORTS = """
import os, sys

log = open(os.path.join(os.environ["IMPORTS"], str(os.getpid())), "w", buffering=1)
sys.addaudithook(lambda event, arguments: event == "import" and log.write(f"{arguments[0]}\\n"))
"""


async def test_four_peers_train_a_job_to_its_end(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with local_swarm(write_job(tmp_path), state, peers=4) as swarm:
        swarm_status = await swarm.ended()
        events = swarm.events
    log = (tmp_path / "swarm.log").read_text()
    assert swarm_status == 0, log
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]
    assert [event["step"] for event in events if event["event"] == "evaluation"] == [2, 4]
    assert {event["name"] for event in events if event["event"] == "peer"} == {"peer-1", "peer-2", "peer-3", "peer-4"}
    plan = next(event for event in events if event["event"] == "plan")
    assert [stage["stage"] for stage in plan["stages"]] == [0, 1, 2, 3]
    assert {event["event"] for event in events} >= {"link", "finished"}
    assert events[-1]["event"] == "finished"
    assert math.isfinite(events[-1]["loss"])
    assert Path(events[-1]["weights"]) == state / "weights.safetensors"
    with safe_open(state / "weights.safetensors", framework="pt") as weights:
        assert "blocks.3.feed_forward.output.weight" in weights.keys()  # noqa: SIM118 (no mapping)
    assert "<svg" in (state / "loss.svg").read_text()
    metrics = [json.loads(line) for line in (state / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics if entry["event"] == "step"] == [1, 2, 3, 4]
    for words in ("weights.safetensors", "loss.svg", "metrics.jsonl", "tokens/s", "->", "a sample of what the model writes"):
        assert words in log


async def test_a_swarm_has_the_peers_of_its_fleet_file(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    state = tmp_path / "state"
    words = ("swarm", write_job(tmp_path, training={"steps": 2}), "--state", state, "--fleet", tmp_path / "fleet.yaml")
    ended = await run_command(*words, "--json", "--set", "plan.stages=2")
    assert ended.status == 0, ended.errors
    assert "atoll: one machine does not imitate rtt of the fleet file" in ended.errors
    events = [json.loads(line) for line in ended.output.splitlines()]
    plan = next(event for event in events if event["event"] == "plan")
    assert {name for stage in plan["stages"] for name in stage["peers"]} == {"attic", "cellar"}
    assert all(stage["predicted_memory_bytes"] <= 0.9 * MEMORY for stage in plan["stages"])
    assert {path.name for path in (state / "logs").iterdir()} == {"coordinator.log", "attic.log", "cellar.log"}


async def test_a_fleet_with_too_little_memory_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("peers: [{name: attic, threads: 1, memory: 100kB}]")
    words = (write_job(tmp_path), "--fleet", tmp_path / "fleet.yaml")
    async with started_swarm(*words, state=tmp_path / "state") as swarm:
        assert await swarm.ended() == 1
    assert "attic ended with exit status 1: --max-memory: 0 MiB are too few" in (tmp_path / "swarm.log").read_text()


async def test_a_peer_process_sees_neither_the_model_nor_its_library(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    (tmp_path / "site").mkdir()
    (tmp_path / "imports").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LOG_IMPORTS)
    job = write_job(tmp_path, model={"builtin": None, "options": {}, "factory": "model.py:make"}, training={"steps": 1})
    variables = {"PYTHONPATH": str(tmp_path / "site"), "IMPORTS": str(tmp_path / "imports")}
    async with local_swarm(job, tmp_path / "state", peers=2, variables=variables) as swarm:
        await swarm.event("peer", name="peer-1")
        peers = {str(process.pid) for process in swarm.processes() if "join" in process.cmdline()}
        assert await swarm.ended() == 0, (tmp_path / "swarm.log").read_text()
    assert len(peers) == 2
    importers = set((tmp_path / "importers").read_text().split())
    assert len(importers) == 1
    assert not importers & peers
    for peer in peers:
        imported = set((tmp_path / "imports" / peer).read_text().split("\n"))
        assert "torch" in imported
        assert not imported & {"transformers", "matplotlib", "model"}
        assert not [name for name in imported if name.startswith("atoll.coordinator")]
