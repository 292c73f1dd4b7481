"""What the peers of a swarm on one machine are started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from atoll.coordinator.cli import swarm
from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.local_fleet import equal_peers, not_imitated, peers_of, trust_of
from atoll.coordinator.planning.fleet import Fleet, parse_fleet
from support.jobs import gpt_job

app = typer.Typer()
app.command()(swarm.command)


def fleet_of(*peers: dict[str, Any], **others: Any) -> Fleet:
    return parse_fleet({"peers": [{"memory": "4GiB", **peer} for peer in peers], **others})


def test_equal_peers_share_the_cores() -> None:
    assert [peer.words for peer in equal_peers(2, 8)] == [
        ["--name", "peer-1", "--threads", "4"],
        ["--name", "peer-2", "--threads", "4"],
    ]
    assert {peer.threads for peer in equal_peers(9, 8)} == {1}


def test_a_fleet_gives_names_threads_and_what_owners_cap() -> None:
    capped = {"name": "attic", "threads": 3, "memory": "500MB", "upload": "20Mbps", "download": "1.5Gbps"}
    attic, lab = peers_of(fleet_of(capped, {"name": "lab", "flops": "2TFLOPS"}), 8)
    caps = ["--max-upload", "20000000bps", "--max-download", "1500000000bps"]
    assert attic.words == ["--name", "attic", "--threads", "3", "--max-memory", "500000000", *caps]
    assert lab.words == ["--name", "lab", "--threads", "4", "--max-memory", str(2**32)]


def test_a_name_that_would_spoil_a_log_is_refused() -> None:
    with pytest.raises(UsageError, match="'coordinator' would write into the coordinator's log"):
        peers_of(fleet_of({"name": "coordinator", "threads": 1}), 2)


def test_what_one_machine_cannot_imitate_is_said() -> None:
    assert not_imitated(fleet_of({"name": "a", "threads": 1}, {"name": "b", "threads": 1}), 2) == ""
    assert not_imitated(fleet_of({"name": "a", "threads": 3}), 2) == "its 3 threads share the 2 cores of this machine"
    link = {"between": ["a", "b"], "rtt": "20ms"}
    fleet = fleet_of({"name": "a", "flops": "1T", "rtt": "3ms"}, {"name": "b", "threads": 1}, links=[link])
    assert not_imitated(fleet, 2) == "one machine does not imitate flops, rtt and links of the fleet file"


def test_untrusted_peers_of_the_file_stay_off_the_ends(tmp_path: Path) -> None:
    fleet = fleet_of({"name": "a", "threads": 1}, {"name": "b", "threads": 1, "trusted": False}, {"name": "c", "threads": 1})
    job = gpt_job(tmp_path)
    assert trust_of(fleet, job) == ()

    def trusting(*names: str) -> tuple[str, ...]:
        wishes = job.plan.model_copy(update={"trusted": names, "trusted_ends": True})
        return trust_of(fleet, job.model_copy(update={"plan": wishes}))

    assert trusting("a", "b", "elsewhere") == ("plan.trusted=[a]",)
    with pytest.raises(UsageError, match=r"plan.trusted_ends needs a peer of plan.trusted \(b\)"):
        trusting("b")


def test_peers_come_from_one_place_and_must_suffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text("peers: [{name: attic, threads: 1, memory: 4GiB}]")
    with pytest.raises(UsageError, match="give the peers with either --peers or --fleet"):
        CliRunner().invoke(app, ["--peers", "2", "--fleet", "fleet.yaml"], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"plan.stages is 2, and each stage needs a peer: add peers to the fleet file"):
        CliRunner().invoke(app, ["--fleet", "fleet.yaml", "--set", "plan.stages=2"], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"plan.stages is 5, and each stage needs a peer: start more with --peers"):
        CliRunner().invoke(app, ["--set", "plan.stages=5"], catch_exceptions=False)
    rows = ", ".join(f"{{name: p{number}, threads: 1, memory: 1GiB}}" for number in range(65))
    Path("fleet.yaml").write_text(f"peers: [{rows}]")
    with pytest.raises(UsageError, match="has 65 peers, and one machine starts 64 at most"):
        CliRunner().invoke(app, ["--fleet", "fleet.yaml"], catch_exceptions=False)
    assert not Path("runs").exists()
