"""Fleet files: what they mean, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.coordinator.planning.fleet import FLOPS_PER_THREAD, fleet_network, fleet_offers, load_fleet, parse_fleet
from atoll.protocol.errors import JobError
from atoll.protocol.quantities import format_bytes, format_rate, format_seconds

EXAMPLE = """
peers:
  - {name: attic, threads: 4, memory: 8GiB, upload: 20Mbps, download: 200Mbps, rtt: 30ms}
  - {name: lab, flops: 12TFLOPS, memory: 24GB, trusted: false}
links:
  - {from: attic, to: lab, rtt: 50ms}
  - {from: lab, to: attic, bandwidth: 80Mbps}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return path


def test_a_fleet_says_what_peers_and_links_can_do(tmp_path: Path) -> None:
    fleet = load_fleet(written(tmp_path, EXAMPLE))
    attic, lab = fleet_offers(fleet)
    assert (attic.name, attic.flops_per_second, attic.memory_bytes, attic.trusted) == (
        "attic",
        4 * FLOPS_PER_THREAD,
        2**33,
        True,
    )
    assert (lab.flops_per_second, lab.memory_bytes, lab.trusted) == (12e12, 24_000_000_000, False)
    network = fleet_network(fleet)
    assert network.upload.tolist() == [2.5e6, np.inf]
    assert network.rate[0, 1] == 2.5e6
    assert network.rate[1, 0] == 10e6
    assert network.latency[0, 1] == network.latency[1, 0] == 0.025
    assert network.estimated.tolist() == [[False, True], [False, False]]


def test_peers_of_one_machine_share_its_cores() -> None:
    peers = [{"name": name, "threads": 2, "memory": "1GiB", "machine": "workshop"} for name in ("one", "other")]
    peers[0] |= {"cores": 3, "rtt": "20ms"}
    one, other = fleet_offers(parse_fleet({"peers": peers}))
    assert (one.machine, one.cores, one.threads) == (other.machine, other.cores, other.threads) == ("workshop", 3, 2)
    assert (one.coordinator_round_trip_seconds, other.coordinator_round_trip_seconds) == (0.02, 0.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (({}, {}), "peers: the machine 'workshop' has no cores; write the same cores: NUMBER at its peers"),
        (({"cores": 4}, {"cores": 2}), "peers: the machine 'workshop' has both 2 and 4 cores; write the same cores"),
        (({"cores": 4, "machine": None}, {}), "of which machine is not said for 'one'; write machine: NAME as well"),
        (({"cores": 0}, {}), "peers.0.cores: 0 is too small; write at least 1"),
    ],
)
def test_a_mistake_in_a_machine_is_one_sentence(changes: tuple[dict[str, Any], ...], sentence: str) -> None:
    peers = [
        {"name": name, "threads": 1, "memory": "1GiB", "machine": "workshop", **change}
        for name, change in zip(("one", "other"), changes, strict=True)
    ]
    with pytest.raises(JobError) as raised:
        parse_fleet({"peers": peers})
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "lab"}, "peers: two peers are named 'lab'; give one of them another name"),
        ({"name": "the attic"}, "'the attic' is not a name; use up to 64 letters, digits, dots, hyphens and underscores"),
        ({"memory": "8 apples"}, "'8 apples' is not an amount of memory; write for example 8GiB or 500MB"),
        ({"memory": True}, "true is not an amount of memory"),
        ({"upload": "20MB/s"}, "'20MB/s' is not a rate; write for example 20Mbps, bits a second and not bytes"),
        ({"upload": 0}, "0 is not a rate"),
        ({"flops": "fast", "threads": None}, "'fast' is not a speed; write for example 4.5TFLOPS"),
        ({"rtt": "30"}, "'30' is not a time; write for example 30ms or 0.2s"),
        ({"threads": None}, "neither is given for 'attic'; write either threads or flops"),
        ({"flops": 1e12}, "both are given for 'attic'; write either threads or flops"),
        ({"uplaod": "20Mbps"}, "unknown key (value 20Mbps); did you mean 'upload'?"),
    ],
)
def test_a_mistake_in_a_peer_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    attic = {"name": "attic", "threads": 4, "memory": "8GiB", **change}
    values = {"peers": [{"name": "lab", "threads": 1, "memory": "8GiB"}, attic]}
    with pytest.raises(JobError) as raised:
        parse_fleet(values)
    said = str(raised.value)
    assert said.startswith("peers")
    assert sentence.removeprefix("peers: ") in said.replace("'20Mbps'", "20Mbps")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("links", "sentence"),
    [
        ([{"between": ["attic", "lap"], "rtt": "1ms"}], "links.0: there is no peer 'lap'; did you mean 'lab'?"),
        ([{"between": ["attic", "attic"], "rtt": "1ms"}], "links.0: 'attic' has no link to itself; name two peers"),
        ([{"between": ["attic", "lab"]}], "links.0: neither bandwidth nor rtt is given; write at least one"),
        ([{"from": "attic", "rtt": "1ms"}], "links.0: the pair is missing; write between: [ONE, OTHER]"),
        ([{"between": ["attic", "lab"], "to": "lab", "rtt": "1ms"}], "links.0: between and from/to are given"),
        (
            [{"between": ["attic", "lab"], "rtt": "1ms"}, {"from": "lab", "to": "attic", "rtt": "2ms"}],
            "links.1: from 'lab' to 'attic' is given twice, at links.0 as well; keep one of them",
        ),
    ],
)
def test_a_mistake_in_a_link_is_one_sentence(links: list[dict[str, Any]], sentence: str) -> None:
    peers = [{"name": name, "threads": 1, "memory": "8GiB"} for name in ("attic", "lab")]
    with pytest.raises(JobError) as raised:
        parse_fleet({"peers": peers, "links": links})
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; a fleet has the key peers, and maybe links"),
        ("[1]", "is not a fleet but [1]; a fleet has the key peers"),
        ("peers: []", "peers: the list is empty; write at least one peer"),
        ("peers: [", "is not YAML"),
        ("links: []", "peers: this key is missing"),
    ],
)
def test_a_file_that_is_no_fleet(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(JobError) as raised:
        load_fleet(written(tmp_path, text))
    assert sentence in str(raised.value)


@pytest.mark.parametrize("name", ["home", "lab", "spot"])
def test_the_examples_are_valid(name: str) -> None:
    fleet = load_fleet(Path(__file__).parents[4] / "examples" / "fleets" / f"{name}.yaml")
    assert len(fleet.peers) >= 2
    assert np.isfinite(fleet_network(fleet).rate).any()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read the fleet file .*: No such file or directory; give the path"):
        load_fleet(tmp_path / "none.yaml")


def test_quantities_for_people() -> None:
    assert (format_bytes(3.2e9), format_bytes(512e3), format_bytes(7)) == ("3.0 GiB", "500.0 KiB", "7 B")
    assert (format_rate(2.5e6), format_rate(float("inf")), format_rate(1.0)) == ("20 Mbit/s", "no limit", "8 bit/s")
    assert format_rate(0.12496e9) == "1000 Mbit/s"
    assert [format_seconds(one) for one in (1250.0, 1.25, 0.9999, 0.04, 4.4e-6, 0.0)] == [
        "1250 s",
        "1.25 s",
        "1 s",
        "40 ms",
        "4.4 us",
        "0 s",
    ]
