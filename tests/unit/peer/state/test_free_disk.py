from __future__ import annotations

from pathlib import Path

from atoll.peer.state.free_disk import free_disk_bytes


def test_free_space_is_that_of_the_disk_where_the_folder_would_be(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path / "not" / "there" / "yet") > 0
    assert free_disk_bytes(None) == 0
