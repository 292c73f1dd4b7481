"""Flags of a peer: sizes, devices, addresses."""

from __future__ import annotations

import pytest

from atoll.peer.measuring.profile import choose_device
from atoll.peer.settings import PeerSettings, rate_of_flag, size_of_flag
from atoll.protocol.channel import parse_address
from atoll.protocol.errors import JobError


def settings(coordinator: str, *, listen: str | None = None, advertise: str | None = None) -> PeerSettings:
    return PeerSettings(coordinator=parse_address(coordinator), name="ann", listen=listen, advertise=advertise)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5G", 1_500_000_000),
        ("64 KiB", 65536),
        ("123", 123),
        ("2tib", 2 * 2**40),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert size_of_flag(text, "--max-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0GiB", "8 giraffes", "8GiBs"])
def test_what_is_no_size_names_the_flag(text: str) -> None:
    with pytest.raises(JobError, match=r"--max-memory: .* is not a size; write for example 8GiB"):
        size_of_flag(text, "--max-memory")


@pytest.mark.parametrize(
    ("text", "rate"), [("20Mbps", 2.5e6), ("1 Gbit/s", 125e6), ("500kbps", 62.5e3), ("8bps", 1.0), ("1.5 gbits/s", 187.5e6)]
)
def test_rates(text: str, rate: float) -> None:
    assert rate_of_flag(text, "--max-upload") == rate


@pytest.mark.parametrize("text", ["", "fast", "20MB/s", "20M", "0Mbps", "-1Mbps", "20Mbps up"])
def test_what_is_no_rate_names_the_flag(text: str) -> None:
    with pytest.raises(JobError, match=r"--max-upload: .* is not a rate; write for example 20Mbps"):
        rate_of_flag(text, "--max-upload")


@pytest.mark.parametrize(
    ("coordinator", "listen"),
    [
        ("127.0.0.1:7000", "127.0.0.1:0"),
        ("localhost:7000", "127.0.0.1:0"),
        ("[::1]:7000", "[::1]:0"),
        ("10.0.0.1:7", "0.0.0.0:0"),
    ],
)
def test_listens_where_the_coordinator_is(coordinator: str, listen: str) -> None:
    assert settings(coordinator).listen_address == listen


def test_advertises_the_bound_address_on_loopback() -> None:
    assert settings("127.0.0.1:7000").advertised_address("127.0.0.1:4711") == "127.0.0.1:4711"


def test_advertises_the_address_on_the_way_to_the_coordinator() -> None:
    host, _, port = settings("127.0.0.1:7000", listen="0.0.0.0:0").advertised_address("0.0.0.0:4711").rpartition(":")
    assert (host, port) == ("127.0.0.1", "4711")


def test_advertise_wins_and_may_leave_the_port_open() -> None:
    assert settings("127.0.0.1:7000", advertise="home.example:0").advertised_address("0.0.0.0:4711") == "home.example:4711"
    assert settings("127.0.0.1:7000", advertise="home.example:9").advertised_address("0.0.0.0:4711") == "home.example:9"


def test_devices() -> None:
    assert choose_device("cpu") == "cpu"
    assert choose_device(None) in ("cpu", "cuda:0", "mps")


@pytest.mark.parametrize("text", ["gpu", "cuda:99", "meta", "xpu:0"])
def test_a_device_that_is_not_here_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(JobError, match=r"--device: .*cpu"):
        choose_device(text)
