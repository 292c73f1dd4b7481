"""Fault plans: what they mean, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.chaos import ChaosPlan, Fault, Place, load_chaos, parse_chaos
from atoll.protocol.errors import JobError

PEERS = ("peer-1", "peer-2", "peer-3")


def place(**changes: Any) -> Place:
    fields: dict[str, Any] = {"process": "peer-2", "stage": 1, "phase": "backward", "step": 5, "microbatch": 2}
    return Place(**{**fields, **changes})


def plan_of(*faults: dict[str, Any], **more: Any) -> ChaosPlan:
    return parse_chaos({"faults": list(faults), **more})


def test_a_fault_happens_at_its_phase_from_its_step_on() -> None:
    (fault,) = plan_of({"fault": "kill", "stage": 1, "step": 5, "phase": "backward", "restart_after": "2s"}).faults
    assert fault.restart_after == 2.0
    assert fault.meets(place())
    assert fault.meets(place(step=7, process="peer-1"))
    for elsewhere in ({"step": 4}, {"stage": 0}, {"stage": None}, {"phase": "forward"}):
        assert not fault.meets(place(**elsewhere))


def test_a_fault_may_name_a_peer_and_a_microbatch() -> None:
    (fault,) = plan_of({"fault": "kill", "peer": "peer-2", "phase": "backward", "microbatch": 2}).faults
    assert fault.meets(place(stage=0, step=1))
    assert not fault.meets(place(process="peer-1"))
    assert not fault.meets(place(microbatch=1))


def test_a_fault_at_a_time_happens_at_no_phase() -> None:
    (fault,) = plan_of({"fault": "kill", "peer": "peer-2", "at": "30s"}).faults
    assert fault.at == 30.0
    assert fault.of_swarm
    assert not fault.meets(place())
    (cut,) = plan_of({"fault": "cut", "peer": "peer-2", "from": "coordinator", "at": 1, "seconds": "500ms"}).faults
    assert (cut.other, cut.seconds, cut.of_swarm) == ("coordinator", 0.5, False)


def test_random_faults_are_drawn_from_the_seed() -> None:
    entry = {"fault": "kill", "per_minute": 6, "count": 200, "restart_after": "1s"}
    drawn = {seed: parse_chaos({"seed": seed, "random": [entry]}).drawn(PEERS) for seed in (1, 2)}
    assert drawn[1] == parse_chaos({"seed": 1, "random": [entry]}).drawn(PEERS) != drawn[2]
    times = [fault.at for fault in drawn[1] if fault.at is not None]
    assert times == sorted(times)
    assert len(times) == 200
    assert 5.0 < times[-1] / 200 < 20.0
    assert {fault.peer for fault in drawn[1]} == set(PEERS)
    assert {(fault.fault, fault.restart_after) for fault in drawn[1]} == {("kill", 1.0)}


def test_random_faults_meet_those_that_are_named() -> None:
    entry = {"fault": "cut", "per_minute": 60, "count": 30, "among": ["peer-1"], "from": "peer-3", "seconds": 1}
    drawn = parse_chaos({"random": [entry]}).drawn(PEERS)
    assert {(fault.peer, fault.other, fault.seconds) for fault in drawn} == {("peer-1", "peer-3", 1.0)}


KILL = {"fault": "kill", "stage": 1, "phase": "forward"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"fault": "kil"}, "faults.0.fault: 'kil' is not known; did you mean 'kill'?"),
        ({"phase": "forwards"}, "faults.0.phase: 'forwards' is not known; did you mean 'forward'?"),
        ({"phase": None}, "neither is given; write either phase: NAME or at: TIME"),
        ({"at": "3s"}, "both are given; write either phase: NAME or at: TIME"),
        ({"stage": None}, "neither is given; write either peer: NAME (or coordinator) or stage: NUMBER"),
        ({"peer": "peer-1"}, "both are given; write either peer: NAME"),
        ({"at": "3s", "phase": None}, "faults.0.at: at that time nobody knows which stage and step it meets; name a peer"),
        ({"phase": "joining"}, "faults.0.phase: a peer that is joining has no stage and no step; name the peer alone"),
        ({"phase": "committing", "microbatch": 0}, "faults.0.microbatch: only forward and backward have microbatches"),
        ({"seconds": 3}, "faults.0.seconds: kill has no seconds; it belongs to freeze, slow, cut or fill_disk"),
        ({"fault": "freeze"}, "faults.0.seconds: freeze needs it; write for example seconds: 30s"),
        ({"fault": "slow"}, "faults.0.factor: slow needs it; write for example factor: 10.0"),
        ({"fault": "slow", "factor": 1}, "faults.0.factor: 1 is too small; write more than 1.0"),
        ({"fault": "corrupt", "phase": "committing"}, "messages are damaged in the phases backward, forward or transferring"),
        ({"fault": "fill_disk"}, "a disk is full when something is written to it; write phase: snapshotting"),
        ({"fault": "cut", "seconds": "long"}, "faults.0.seconds: 'long' is not a time; write for example 30s or 500ms"),
        ({"fault": "corrupt", "stage": None, "peer": "coordinator"}, "the coordinator can be killed and frozen, not corrupt"),
        ({"restart": 3}, "unknown key (value 3)"),
        ({"step": 0}, "faults.0.step: 0 is too small; write at least 1"),
    ],
)
def test_a_mistake_in_a_fault_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    values = {key: value for key, value in {**KILL, **change}.items() if value is not None}
    with pytest.raises(JobError) as raised:
        plan_of(values)
    assert sentence in str(raised.value)
    assert str(raised.value).startswith("faults.0")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "nothing goes wrong in it; write at least one entry under faults or random"),
        ({"random": [{"fault": "corrupt", "per_minute": 1}]}, "corrupt needs a phase; write it under faults"),
        ({"random": [{"fault": "kill"}]}, "random.0.per_minute: this key is missing; add it"),
        (
            {"random": [{"fault": "kill", "per_minute": 1, "count": 1000}]},
            "random.0.count: 1000 is too large; write at most 500",
        ),
    ],
)
def test_a_mistake_in_a_plan_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError) as raised:
        parse_chaos(values)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"fault": "kill", "peer": "peer-9", "phase": "forward"}, "faults.0.peer: there is no peer 'peer-9'; did you mean"),
        ({"fault": "cut", "stage": 0, "from": "x", "phase": "forward", "seconds": 1}, "faults.0.from: there is no peer 'x'"),
    ],
)
def test_a_peer_that_is_not_there_is_named(fault: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError) as raised:
        plan_of(fault).drawn(PEERS)
    assert sentence in str(raised.value)


def test_the_example_is_valid_and_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    examples = Path(__file__).parents[3] / "examples" / "chaos"
    assert all(isinstance(fault, Fault) for fault in load_chaos(examples / "churn.yaml").drawn(PEERS))
    with pytest.raises(JobError, match="cannot read the fault plan"):
        load_chaos(tmp_path / "none.yaml")
