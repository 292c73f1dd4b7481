"""A process that writes two snapshots, the second one so slowly that it can be killed in the middle: ``CACHE [FILE_LIMIT]``."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

from atoll.peer.stage.events import SnapshotWritten
from atoll.peer.state import snapshot_part
from atoll.peer.state.snapshot_folder import SnapshotFolder
from atoll.peer.state.snapshot_writer import SnapshotWriter
from atoll.protocol.ids import PeerId, StepNumber
from support.states import state_of

RUN = "d" * 32
NAME = "weight"
NUM_ELEMENTS = 2**20


def main(cache: Path, file_limit: int | None) -> None:
    """Writes step 1; then step 2, in hundreds of writes that take seconds, or against a limit on the size of a file."""
    done = threading.Event()

    def tell(written: SnapshotWritten) -> None:
        print(written.step, written.failure or "complete", flush=True)
        done.set()

    writer = SnapshotWriter(SnapshotFolder(cache), PeerId("ann"), tell)
    writer.run_id = RUN
    writer.start()
    writer.write(StepNumber(1), state_of(NAME, num_elements=1000, seed=1))
    assert done.wait(30)
    done.clear()
    if file_limit is None:
        _slow_down()
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    writer.write(StepNumber(2), state_of(NAME, num_elements=NUM_ELEMENTS, seed=2))
    writer.wait_until_read(within_seconds=60)
    assert done.wait(60)
    writer.stop()
    writer.join(10)


def _slow_down() -> None:
    write_all = snapshot_part._write_all

    def slow(file: int, data: memoryview, offset: int) -> None:
        time.sleep(0.005)
        write_all(file, data, offset)

    snapshot_part._PIECE_BYTES = 2**13
    snapshot_part._write_all = slow


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
