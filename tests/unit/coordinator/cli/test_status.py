"""What `atoll status` and `atoll peers` print."""

from __future__ import annotations

from atoll.coordinator.cli.status import as_dict, in_order, peer_lines, status_lines
from atoll.protocol.v1.operator_pb2 import PeerStatus, StatusReply


def reply() -> StatusReply:
    peers = [
        PeerStatus(name="spare", state="spare", stage=-1),
        PeerStatus(name="b", state="ready", stage=0, layers="a - b", resident_bytes=1 << 20, memory_bytes=1 << 30),
        PeerStatus(name="a", state="ready", stage=1, layers="c - d", phase="waiting for gradient", waiting_for="b"),
    ]
    return StatusReply(
        run="demo", state="training", reason="waits for b in step 3", state_seconds=61, step=2, steps=9, loss=2.5, peers=peers
    )


def test_status_says_where_the_run_is_and_whom_it_waits_for() -> None:
    assert status_lines(reply()) == [
        "demo: training for 1:01, plan 0",
        "the run waits for b in step 3",
        "step 2/9, loss 2.5000, 0 tokens/s",
    ]


def test_a_failed_run_says_why() -> None:
    assert status_lines(StatusReply(run="demo", state="failed", reason="b was lost"))[1] == "b was lost"


def test_peers_are_listed_as_the_data_flows() -> None:
    assert [peer.name for peer in in_order(reply())] == ["b", "a", "spare"]
    lines = peer_lines(reply())
    assert lines[1].split() == ["b", "ready", "a", "-", "b", "1.0", "MiB", "of", "1.0", "GiB", "0", "B", "ready", "0", "s"]
    assert "waiting for gradient from b" in lines[2]
    assert peer_lines(StatusReply()) == []


def test_json_has_every_plain_field_zeros_too() -> None:
    row = as_dict(PeerStatus(name="a"))
    assert row["name"] == "a"
    assert row["bytes_sent"] == 0
    assert "peers" not in as_dict(StatusReply())
