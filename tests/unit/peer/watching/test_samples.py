"""A peer's numbers as a scraper reads them."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from atoll.peer.links.usage import Reception
from atoll.peer.watching.doings import Doings
from atoll.peer.watching.samples import Standing
from atoll.protocol.exposition import text_of
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.v1.session_pb2 import LinkUse

ANN, BOB, EVE = PeerId("ann"), PeerId("bob"), PeerId("eve")


def standing(**changes: Any) -> Standing:
    values: dict[str, Any] = {
        "now": 50.0,
        "peer": ANN,
        "run": "tiny",
        "device": "cpu",
        "session": "ready",
        "states": ("idle", "ready"),
        "stage": 1,
        "generation": 3,
        "step": 7,
        "memory_bytes": 2**20,
        "grown_memory_bytes": 2**19,
        "queued_commands": 2,
        "queued_codings": 1,
        "lease_age_seconds": 1.5,
        "fetched_bytes": 0,
        "doings": Doings(0.0),
        **changes,
    }
    return Standing(**values)


def numbers(found: Standing) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(text_of(found).decode())
    return {(sample.name, *sorted(sample.labels.values())): sample.value for family in families for sample in family.samples}


def use(target: str) -> LinkUse:
    return LinkUse(
        source=ANN, target=target, direction="forward", codec="int8", bytes=100, raw_bytes=400, seconds_busy=2.5, messages=3
    )


def test_what_it_is_and_does_now() -> None:
    found = numbers(standing())
    assert found["atoll_own_info", "ann", "cpu", "tiny"] == 1.0
    assert (found["atoll_own_session", "ready"], found["atoll_own_session", "idle"]) == (1.0, 0.0)
    assert (found["atoll_own_stage",], found["atoll_own_step",], found["atoll_own_queued_commands",]) == (1.0, 7.0, 2.0)
    assert found["atoll_own_lease_age_seconds",] == 1.5
    assert ("atoll_own_snapshot_step",) not in found


def test_memory_predicted_and_measured_and_the_age_of_the_snapshot() -> None:
    doings = Doings(0.0)
    doings.predicted_memory_bytes, doings.snapshot = 4096, (StepNumber(6), 40.0)
    found = numbers(standing(doings=doings))
    assert (found["atoll_own_predicted_memory_bytes",], found["atoll_own_grown_memory_bytes",]) == (4096.0, 2.0**19)
    assert (found["atoll_own_snapshot_step",], found["atoll_own_snapshot_age_seconds",]) == (6.0, 10.0)


def test_seconds_by_what_they_went_into() -> None:
    doings = Doings(0.0)
    doings.seconds.update({"forward": 3.0, "waiting for activation": 4.0})
    found = numbers(standing(doings=doings, coding_seconds={"encode": 0.5, "decode": 0.25}))
    assert found["atoll_own_seconds_total", "forward"] == 3.0
    assert found["atoll_own_seconds_total", "waiting for activation"] == 4.0
    assert found["atoll_own_seconds_total", "idle"] == 0.0
    assert (found["atoll_own_coding_seconds_total", "encode"], found["atoll_own_coding_seconds_total", "decode"]) == (0.5, 0.25)


def test_links_are_those_of_the_present_plan() -> None:
    received = {BOB: Reception(num_bytes=70, seconds=1.25), EVE: Reception(num_bytes=9)}
    found = numbers(standing(links=(use(BOB), use(EVE)), receptions=received, unacknowledged={BOB: 4}))
    assert found["atoll_own_link_bytes_total", "bob", "forward"] == 100.0
    assert found["atoll_own_link_seconds_busy_total", "bob", "forward"] == 2.5
    assert found["atoll_own_link_codec", "bob", "forward", "int8"] == 1.0
    assert found["atoll_own_link_unacknowledged", "bob"] == 4.0
    assert (found["atoll_own_received_bytes_total", "bob"], found["atoll_own_receiving_seconds_total", "bob"]) == (70.0, 1.25)
    assert not any(EVE in key for key in found)
