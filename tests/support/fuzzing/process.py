"""One target in a process of its own, fed by atheris: coverage leads it to what was not tried yet.

``python -m support.fuzzing.process TARGET RUNS CORPUS ARTIFACTS``. The process may take MORE_BYTES beyond what it has when it
begins, and SECONDS an input; what goes beyond, and every exception that is not the project's, ends it with an input in the
folder ARTIFACTS.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from pathlib import Path

import atheris
import torch

from support.fuzzing.target import LARGEST_INPUT

MORE_BYTES = 2**29
"""A thousand times the largest tensor that targets take: what a decoder needs beside it, and what the fuzzer keeps."""
SECONDS = 10
"""An input takes a millisecond; a machine that is busy may take long for all of them."""


def main() -> None:
    """Never returns: the fuzzer ends the process."""
    name, runs, corpus, artifacts = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    with atheris.instrument_imports(include=["atoll"], enable_loader_override=False):
        from support.fuzzing.targets import all_targets

        target = all_targets()[name]
    for place, seed in enumerate(target.seeds()):
        target.run(seed)
        (corpus / f"seed-{place}").write_bytes(seed[:LARGEST_INPUT])
    _limit_memory()

    def keep_what_crashes(data: bytes) -> None:
        """The fuzzer keeps inputs that kill the process or hang; not all that raise."""
        try:
            target.run(data)
        except BaseException:
            (artifacts / "raised").write_bytes(data)
            raise

    flags = (f"-runs={runs}", f"-max_len={LARGEST_INPUT}", f"-timeout={SECONDS}", "-rss_limit_mb=0", "-print_final_stats=1")
    atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={artifacts}{os.sep}", str(corpus)], keep_what_crashes)
    atheris.Fuzz()


def _limit_memory() -> None:
    """By what the process writes to; address space is taken in advance by libraries that never use it."""
    with contextlib.suppress(FileNotFoundError):
        found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
        assert found is not None
        limit = 1024 * int(found[1]) + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
