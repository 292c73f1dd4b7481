"""What a peer keeps of its identity, and a token that comes as a file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.coordinator.cli.invite import keep_invitation
from atoll.coordinator.identity.run_identity import RunIdentity
from atoll.peer.session.enrolling import Belonging
from atoll.peer.session.identity_folder import IdentityFolder, Kept
from atoll.peer.settings import Patience, PeerSettings
from atoll.protocol.channel import parse_address
from atoll.protocol.errors import IdentityRefused
from atoll.protocol.identity import Role
from support.identities import RUN_ID, SmallAuthority

RUN = b"\x01" * 32


def test_what_is_kept_is_this_users_alone_and_comes_back(tmp_path: Path) -> None:
    folder = IdentityFolder(tmp_path, "ann")
    kept = Kept(credentials=SmallAuthority().credentials(Role.PEER, "ann"), invitation="0a0b")
    assert folder.load(RUN) is None
    folder.keep(RUN, kept)
    assert folder.load(RUN) == kept
    assert folder.load(b"\x02" * 32) is None, "another run"
    assert IdentityFolder(tmp_path, "bob").load(RUN) is None
    (path,) = tmp_path.rglob("ann.pem")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_others_may_read_or_is_damaged_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = IdentityFolder(tmp_path, "ann")
    folder.keep(RUN, Kept(credentials=SmallAuthority().credentials(Role.PEER, "ann"), invitation=""))
    (path,) = tmp_path.rglob("ann.pem")
    path.chmod(0o640)
    assert folder.load(RUN) is None
    assert "chmod 600" in caplog.text
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:300])
    assert folder.load(RUN) is None


def test_a_peer_without_a_folder_keeps_nothing() -> None:
    folder = IdentityFolder(None, "ann")
    folder.keep(RUN, Kept(credentials=SmallAuthority().credentials(Role.PEER, "ann"), invitation=""))
    assert folder.load(RUN) is None


async def test_a_token_in_a_file_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "token"
    settings = PeerSettings(coordinator=parse_address("127.0.0.1:1"), name="ann", token_file=path)
    waiting = asyncio.create_task(Belonging(settings).open())
    await asyncio.sleep(0)
    path.write_text("no-token\n")
    with pytest.raises(IdentityRefused, match="does not begin with atoll1-"):
        await asyncio.wait_for(waiting, 10.0)


async def test_a_file_that_never_comes_is_a_sentence(tmp_path: Path) -> None:
    settings = PeerSettings(
        coordinator=parse_address("127.0.0.1:1"), name="ann", token_file=tmp_path / "token", patience=Patience(end=0.1)
    )
    with pytest.raises(IdentityRefused, match=r"--token-file: no token was in .* within 0\.1 s"):
        await Belonging(settings).open()


def test_an_invitation_that_is_kept_in_a_file_stays_as_long_as_it_holds(tmp_path: Path) -> None:
    RunIdentity.open(tmp_path / "one", RUN_ID).close()
    path = tmp_path / "token"
    keep_invitation(path, tmp_path / "one")
    first = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    keep_invitation(path, tmp_path / "one")
    assert path.read_text() == first
    RunIdentity.open(tmp_path / "two", "0f" * 16).close()
    keep_invitation(path, tmp_path / "two")
    assert path.read_text() != first, "another run's token is of no use"
