"""A process that is a member of rounds: ``[--host HOST] [--die-after PARTS | --freeze-after PARTS]``.

It prints its address, as JSON, then reads whom to expect, and a round a line, and prints what came of each, until its input
ends.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from atoll.peer.averaging.averager import Member, Round
from atoll.peer.averaging.hivemind_averager import HivemindAverager
from atoll.protocol.errors import RoundFailed
from atoll.protocol.hive import HivePlace


def values_of(seed: int, count: int) -> torch.Tensor:
    """What the member with this seed brings."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5)


def digest(values: torch.Tensor) -> str:
    """Of a tensor's bits."""
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def round_line(round: Round, *, seed: int, count: int, repeat: int = 1) -> bytes:
    """What to write to a member's standard input."""
    return (json.dumps({"round": asdict(round), "seed": seed, "count": count, "repeat": repeat}) + "\n").encode()


def expect_line(addresses: Iterable[str]) -> bytes:
    """What to write to a member's standard input before the first round: where the others are."""
    return (json.dumps({"expect": list(addresses)}) + "\n").encode()


async def main(options: argparse.Namespace) -> None:
    averager = await HivemindAverager.start(HivePlace(host=options.host))
    _say({"address": averager.address, "hive": averager.hive.pid, "folder": str(averager.hive.folder)})
    _sabotage(options)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            wanted = json.loads(line)
            if "expect" in wanted:
                averager.expect(wanted["expect"])
                _say({})
            else:
                _say(await _outcome(averager, wanted))
    finally:
        await averager.close()


async def _outcome(averager: HivemindAverager, wanted: dict[str, Any]) -> dict[str, Any]:
    fields = wanted["round"] | {"members": tuple(Member(**member) for member in wanted["round"]["members"])}
    values = values_of(wanted["seed"], wanted["count"])
    seconds = []
    for repetition in range(wanted["repeat"]):
        began = time.monotonic()
        try:
            (mean,) = await averager.average(Round(**fields | {"key": f"{fields['key']}/{repetition}"}), [values])
        except RoundFailed as failure:
            return {"failed": str(failure), "suspects": failure.suspects, "seconds": [time.monotonic() - began]}
        seconds.append(time.monotonic() - began)
    return {"digest": digest(mean), "head": mean[:4].tolist(), "seconds": seconds}


def _sabotage(options: argparse.Namespace) -> None:
    """Has this process kill or stop itself in the middle of a round."""
    from atoll.peer.averaging.part_codec import PartCodec

    left = options.die_after or options.freeze_after
    if not left:
        return
    encode = PartCodec._encode

    def counted(self: PartCodec, tensor: torch.Tensor, edge: str) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL if options.die_after else signal.SIGSTOP)
        return encode(self, tensor, edge)

    PartCodec._encode = counted  # type: ignore[method-assign]


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--freeze-after", type=int, default=0)
    torch.set_num_threads(1)
    asyncio.run(main(parser.parse_args()))
