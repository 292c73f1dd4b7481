"""Memory of stages: what the plan predicts beside what peer processes take, over a grid of models, cuts and settings.

    python benchmarks/memory.py [--only NAME ...]

Each trial runs one model for two steps, one peer process a stage (never more than about 2 GB in all), with as many microbatches
in flight as each stage may hold. Prints a row for each stage: the bytes predicted, and by how much the peak of its process's
resident memory lies above what it was before the stage; then the median and the largest error, and the rows as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from contestants import ROOT
from pipeline import machine

if TYPE_CHECKING:
    from support.memory_trials import Found

MEBIBYTE = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), help="names of trials; by default all")
    options = parser.parse_args()
    # The drivers of peers are those of the tests.
    sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "coordinator", "peer", "protocol", "compression")]
    from support.memory_grid import GRID
    from support.memory_trials import run_trial

    rows: list[Found] = []
    print(f"{'trial':18} stage in flight  predicted   measured    error")
    for name in options.only or GRID:
        for row in asyncio.run(run_trial(GRID[name]())):
            rows.append(row)
            sizes = f"{row.predicted / MEBIBYTE:6.0f} MiB {row.grown / MEBIBYTE:6.0f} MiB"
            print(f"{row.trial:18} {row.stage:5} {row.in_flight:9} {sizes} {row.error:+8.1%}", flush=True)
    errors = [abs(row.error) for row in rows]
    print(f"error: median {statistics.median(errors):.1%}, largest {max(errors):.1%} of {len(errors)} stages")
    print(json.dumps({"machine": machine(), "stages": [asdict(row) for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
