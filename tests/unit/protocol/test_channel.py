"""Addresses as people write them, and ports that are taken."""

from __future__ import annotations

import socket

import pytest

from atoll.protocol.channel import CHANNEL_OPTIONS, SERVER_OPTIONS, Address, open_channel, parse_address, start_server
from atoll.protocol.errors import IdentityRefused, JobError, ResourceError
from atoll.protocol.security import PlainText


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7000", "127.0.0.1", 7000),
        ("[::1]:0", "::1", 0),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("trainer.example.org:80", "trainer.example.org", 80),
    ],
)
def test_addresses_round_trip(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:port", "host:65536", "host:-1", "::1:80", "host:\N{FULLWIDTH DIGIT EIGHT}0"]
)
def test_what_is_no_address_is_named_with_its_flag(text: str) -> None:
    with pytest.raises(JobError, match=r"--listen: .*127\.0\.0\.1:7000|--listen: .*brackets"):
        parse_address(text, "--listen")


def test_loopback_and_unspecified() -> None:
    assert Address("127.8.0.1", 1).is_loopback
    assert parse_address("[::1]:1").is_loopback
    assert not Address("10.0.0.1", 1).is_loopback
    assert parse_address("0.0.0.0:1").is_unspecified
    assert parse_address("[::]:1").is_unspecified


def test_the_message_size_limit_is_left_alone() -> None:
    names = {name for name, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS)}
    assert not any("message_length" in name for name in names)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_port_zero_becomes_a_real_port(host: str) -> None:
    server, address = await start_server([], f"{host}:0")
    assert parse_address(address).port > 0
    assert address.startswith(f"{host}:")
    await server.stop(0)


async def test_a_port_in_use_is_one_sentence_with_port_holder_and_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"port {port} is in use by python.*\(pid \d+\).*--listen HOST:PORT"):
            await start_server([], f"127.0.0.1:{port}")


async def test_a_second_server_on_the_same_port_is_refused() -> None:
    first, address = await start_server([], "127.0.0.1:0")
    with pytest.raises(ResourceError, match="in use"):
        await start_server([], address)
    await first.stop(0)
    again, same = await start_server([], address)
    assert same == address
    await again.stop(0)


@pytest.mark.parametrize("listen", ["192.0.2.1:0", "192.0.2.1:7001", "no-such-host.invalid:0", "no-such-host.invalid:7001"])
async def test_an_address_that_is_not_ours_is_one_sentence(listen: str) -> None:
    with pytest.raises(ResourceError, match=r"cannot listen on .*--listen"):
        await start_server([], listen, security=PlainText(anywhere=True))


@pytest.mark.parametrize("address", ["0.0.0.0:0", "192.0.2.1:7000", "coordinator.example:7000"])
async def test_plain_text_stays_on_this_machine(address: str) -> None:
    with pytest.raises(IdentityRefused, match="plain text is for one machine alone: leave --insecure away"):
        open_channel(address)
    if address.endswith(":0"):
        with pytest.raises(IdentityRefused, match="is not on this machine"):
            await start_server([], address)
