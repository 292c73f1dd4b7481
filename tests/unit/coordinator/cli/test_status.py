"""What `atoll status` and `atoll peers` print."""

from __future__ import annotations

from atoll.coordinator.cli.status import as_dict, comparison_lines, in_order, peer_lines, status_lines
from atoll.protocol.v1.operator_pb2 import LinkStatus, PeerStatus, SnapshotStatus, StatusReply


def reply() -> StatusReply:
    peers = [
        PeerStatus(name="spare", state="spare", stage=-1),
        PeerStatus(name="b", state="ready", stage=0, layers="a - b", resident_bytes=1 << 20, memory_bytes=1 << 30),
        PeerStatus(name="a", state="ready", stage=1, layers="c - d", phase="waiting for gradient", waiting_for="b"),
    ]
    return StatusReply(
        run="demo",
        state="training",
        reason="waits for b in step 3",
        state_seconds=61,
        step=2,
        journal_step=2,
        steps=9,
        loss=2.5,
        peers=peers,
    )


def test_status_says_where_the_run_is_and_whom_it_waits_for() -> None:
    assert status_lines(reply()) == [
        "demo: training for 1:01, plan 0",
        "the run waits for b in step 3",
        "step 2/9, loss 2.5000, 0 tokens/s",
        "no snapshot is complete",
    ]


def test_status_says_what_the_run_could_go_back_to_and_that_it_did() -> None:
    told = reply()
    told.journal_step = 7
    told.complete_snapshot.CopyFrom(SnapshotStatus(step=5, age_seconds=65.0, bytes=3 << 20))
    assert status_lines(told)[2:] == [
        "step 2/9, done again up to step 7, loss 2.5000, 0 tokens/s",
        "newest snapshot: step 5, 1:05 old, 3.0 MiB; not all of its copies are made",
    ]
    told.safe_snapshot.CopyFrom(SnapshotStatus(step=4, age_seconds=-1.0, bytes=6 << 20))
    assert status_lines(told)[3] == "newest safe snapshot: step 4, 6.0 MiB"


def test_a_failed_run_says_why() -> None:
    assert status_lines(StatusReply(run="demo", state="failed", reason="b was lost"))[1] == "b was lost"


def test_peers_are_listed_as_the_data_flows() -> None:
    assert [peer.name for peer in in_order(reply())] == ["b", "a", "spare"]
    lines = peer_lines(reply())
    assert lines[1].split() == ["b", "ready", "-", "a", "-", "b", "1.0", "MiB", "of", "1.0", "GiB", "0", "B", "ready", "0", "s"]
    assert "waiting for gradient from b" in lines[2]
    assert peer_lines(StatusReply()) == []


def test_json_has_every_plain_field_zeros_too() -> None:
    row = as_dict(PeerStatus(name="a"))
    assert row["name"] == "a"
    assert row["bytes_sent"] == 0
    assert "peers" not in as_dict(StatusReply())


def test_predictions_stand_beside_what_was_measured() -> None:
    told = reply()
    told.predicted_step_seconds, told.measured_step_seconds = 0.5, 0.75
    told.peers[1].predicted_compute_seconds, told.peers[1].measured_compute_seconds = 0.4, 0.41
    told.peers[1].predicted_memory_bytes, told.peers[1].measured_memory_bytes = 3 << 20, 0
    told.peers[2].measurement = "estimated: it did not answer within 20 s"
    links = [
        LinkStatus(
            source="b", target="a", codec="bf16", predicted_bytes_per_second=1e6, predicted_seconds=0.02, estimated=True
        ),
        LinkStatus(source="a", target="b", codec="raw", predicted_bytes_per_second=2e6, measured_bytes_per_second=1e6),
        LinkStatus(source="a", target="c", codec="int8", relative_error=0.006, damage=0.0012),
    ]
    links[0].estimated = True
    told.links.extend(links)
    rows = [line.split("  ") for line in comparison_lines(told)]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        [],
        ["predicted", "measured"],
        ["a step", "500 ms", "750 ms"],
        ["b computes in a step", "400 ms", "410 ms"],
        ["b needs", "3.0 MiB", "-"],
        ["a computes in a step", "0 s", "-"],
        ["a needs", "0 B", "-"],
        ["b > a (bf16)", "8 Mbit/s, estimated, busy 20 ms", "-"],
        ["a > b (raw)", "16 Mbit/s, busy 0 s", "8 Mbit/s"],
        ["a > c (int8)", "0 bit/s, busy 0 s", "error 0.60%, costs 0.12% of the loss"],
        ["a could not be measured, its speed is estimated: it did not answer within 20 s"],
    ]
    assert comparison_lines(reply()) == []
