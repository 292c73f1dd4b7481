from __future__ import annotations

import shutil
import threading
from pathlib import Path

from atoll.protocol.folders import paths_in

LOOKS = 3000


def test_what_matches_is_found_in_order_and_a_missing_folder_holds_nothing(tmp_path: Path) -> None:
    for name in ("b/2.part", "b/.hidden.part", "a/1.part", "a/1.other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert paths_in(tmp_path, "*/*.part") == [tmp_path / name for name in ("a/1.part", "b/.hidden.part", "b/2.part")]
    assert paths_in(tmp_path / "missing", "*") == []


def test_folders_that_are_rotated_away_meanwhile_are_left_out(tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "0" / "whole.part"
    kept.parent.mkdir(parents=True)
    kept.touch()
    done = threading.Event()

    def rotate() -> None:
        while not done.is_set():
            for step in map(str, range(3)):
                (tmp_path / "run" / step).mkdir(parents=True, exist_ok=True)
                (tmp_path / "run" / step / "some.part").touch()
            shutil.rmtree(tmp_path / "run")

    rotation = threading.Thread(target=rotate)
    rotation.start()
    try:
        assert all(kept in paths_in(tmp_path, "*/*/*.part") for _ in range(LOOKS))
    finally:
        done.set()
        rotation.join()
