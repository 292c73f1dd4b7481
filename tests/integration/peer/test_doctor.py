"""What `atoll-peer doctor` finds where all is well, and where something is not."""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.coordinator.cli.invite import invite_for_swarm
from atoll.coordinator.identity import run_identity
from atoll.coordinator.identity.run_identity import RunIdentity
from atoll.coordinator.sessions.examining import ExaminationServicer
from atoll.peer.doctor.diagnosis import Finding, Verdict, is_fit
from atoll.peer.doctor.doctor import examine
from atoll.peer.doctor.table import show
from atoll.peer.session import enrolling
from atoll.peer.session.enrolling import Belonging
from atoll.peer.settings import PeerSettings
from atoll.protocol.certificates import Key
from atoll.protocol.channel import parse_address, start_server
from atoll.protocol.errors import SessionError
from atoll.protocol.ids import COORDINATOR
from atoll.protocol.invitation import Token, asking_certificate
from atoll.protocol.probe_server import ProbesServicer
from atoll.protocol.security import PlainText

SUBJECTS = ["name", "connection", "encryption", "invitation", "protocol", "clock", "reachability", "throughput"]
LOCAL = ["disk", "memory", "device"]


@asynccontextmanager
async def examining(folder: Path) -> AsyncIterator[PeerSettings]:
    """What a coordinator has a doctor meet, and the settings of a peer that is invited."""
    state = folder / "state"
    RunIdentity.open(state, "0" * 32).close()
    token = invite_for_swarm(state)
    identity = RunIdentity.open(state, "0" * 32)
    examination = ExaminationServicer("0.1", identity.security)

    async def refusal(name: str) -> str | None:
        return None if examination.is_here(name) else "nobody is here"

    services = [identity.add_services, examination.register, ProbesServicer(COORDINATOR, refusal=refusal).register]
    server, address = await start_server(services, "127.0.0.1:0", security=identity.security)
    try:
        yield settings_for(address, folder, token)
    finally:
        await server.stop(grace=None)
        identity.close()


def settings_for(address: str, folder: Path, token: str | None = None) -> PeerSettings:
    where = parse_address(address)
    return PeerSettings(coordinator=where, name="zoe", cache=folder / "cache", token=token)


async def found_by(settings: PeerSettings) -> Mapping[str, Finding]:
    return {finding.subject: finding async for finding in examine(settings)}


async def test_where_all_is_well_nothing_is_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with examining(tmp_path) as settings:
        found = await found_by(settings)
        assert list(found) == SUBJECTS + LOCAL
        assert is_fit(found.values()), found
        for subject in ("name", "connection", "encryption", "invitation", "protocol", "clock", "reachability", "device"):
            assert (found[subject].verdict, found[subject].mend) == (Verdict.GOOD, ""), found[subject]
        assert "Mbps up" in found["throughput"].found
        again = replace(settings, token=None)  # the run knows it by now
        assert is_fit(await show(again, as_json=True))
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(line["event"], line["subject"]) for line in lines] == [("examined", subject) for subject in SUBJECTS + LOCAL]


async def test_who_is_not_invited_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with examining(tmp_path) as settings:
        findings = await show(replace(settings, token=None), as_json=False)
        found = {finding.subject: finding for finding in findings}
        assert (found["invitation"].verdict, found["encryption"].verdict) == (Verdict.BAD, Verdict.GOOD)
        assert "atoll invite" in found["invitation"].mend
        assert {found[subject].verdict for subject in SUBJECTS[4:]} == {Verdict.UNKNOWN}
        assert "What is bad keeps this machine from working." in capsys.readouterr().out


async def test_plain_text_and_tls_do_not_meet(tmp_path: Path) -> None:
    plain = PlainText()
    services = [ExaminationServicer("0.1", plain).register, ProbesServicer(COORDINATOR).register]
    server, address = await start_server(services, "127.0.0.1:0", security=plain)
    try:
        found = await found_by(settings_for(address, tmp_path, "atoll1-x"))
        assert found["encryption"].verdict is Verdict.BAD
        assert "--insecure" in found["encryption"].mend
        found = await found_by(replace(settings_for(address, tmp_path), insecure=True))
        assert is_fit(found.values()), found
        assert found["clock"].verdict is Verdict.GOOD
        assert "encryption" not in found
    finally:
        await server.stop(grace=None)


async def test_names_and_ports_that_are_none(tmp_path: Path) -> None:
    unknown = await found_by(settings_for("no-such-host.invalid:7000", tmp_path))
    assert unknown["name"].verdict is Verdict.BAD
    assert "no-such-host.invalid" in unknown["name"].found
    assert unknown["connection"].verdict is Verdict.UNKNOWN
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        refused = await found_by(settings_for(f"127.0.0.1:{port}", tmp_path))
    assert refused["connection"].verdict is Verdict.BAD
    assert f"--listen 0.0.0.0:{port}" in refused["connection"].mend
    assert list(refused)[-3:] == LOCAL


async def test_a_peer_that_cannot_be_dialled_is_told_what_to_forward(tmp_path: Path) -> None:
    async with examining(tmp_path) as settings:
        found = await found_by(replace(settings, advertise="127.0.0.1:1"))
        assert found["reachability"].verdict is Verdict.POOR
        assert "127.0.0.1:1" in found["reachability"].found
        assert "--advertise" in found["reachability"].mend


async def test_a_clock_that_is_hours_behind_is_told_at_join_and_by_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round: the coordinator's is ahead."""
    ahead = datetime.timedelta(hours=2)
    monkeypatch.setattr(run_identity, "_now", lambda: datetime.datetime.now(datetime.UTC) + ahead)
    async with examining(tmp_path) as settings:
        with pytest.raises(SessionError, match=r"this machine's clock says .* at least 2\.0 h behind.*timedatectl"):
            await Belonging(settings).open()
        found = await found_by(settings)
        assert found["encryption"].verdict is Verdict.BAD
        assert "2.0 h behind" in found["encryption"].found
        assert "timedatectl" in found["encryption"].mend


async def test_a_clock_that_is_hours_ahead_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = datetime.timedelta(hours=5)

    def asking(token: Token, run_id: str, now: datetime.datetime) -> tuple[Key, object]:
        return asking_certificate(token, run_id, now + ahead)

    monkeypatch.setattr(enrolling, "asking_certificate", asking)
    async with examining(tmp_path) as settings:
        await asyncio.wait_for(Belonging(settings).open(), 60)
