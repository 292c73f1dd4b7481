"""How long replicas take to average, with hivemind's connections under our ordered all-reduce.

    python benchmarks/averaging.py [--replicas 4] [--values 5000000] [--codec fp16]

The replicas run on the hosts of ATOLL_TEST_HOSTS, one on each, or all over loopback where that is not set. A round lasts
from the call to its return at the slowest replica; all must have the same bits. The bound is what each must send, V (2 -
2/n) values, at the rate of its link (--mbps). Prints a line a round and then, as the last line, all as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from contestants import ROOT, Processes
from setting import LOOPBACK, hosts_of_environment


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Replicas as processes, and what the slowest of them took each time."""
    sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "coordinator", "peer", "protocol", "compression")]
    from atoll.peer.averaging.averager import Member, Round
    from atoll.protocol.ids import PeerId
    from support.averaging_member import expect_line, round_line

    hosts = hosts_of_environment() or [LOOPBACK]
    processes = Processes(Path(tempfile.mkdtemp(prefix="atoll-benchmark-averaging-")))
    member = str(ROOT / "tests" / "support" / "averaging_member.py")
    with processes.limited():
        replicas = []
        for index in range(options.replicas):
            host = hosts[index % len(hosts)]
            replicas.append(processes.start(f"replica-{index}", host, [member, "--host", host.address], stdin=subprocess.PIPE))
        said = [_answer(replica, processes) for replica in replicas]
        members = tuple(Member(peer=PeerId(f"replica-{index}"), address=one["address"]) for index, one in enumerate(said))
        for replica in replicas:
            assert replica.stdin is not None
            replica.stdin.write(expect_line(member.address for member in members).decode())
            replica.stdin.flush()
            _answer(replica, processes)
        whole = Round(key="benchmark", members=members, own=0, codec=options.codec)
        for own, replica in enumerate(replicas):
            assert replica.stdin is not None
            line = round_line(replace(whole, own=own), seed=own, count=options.values, repeat=options.rounds + 1)
            replica.stdin.write(line.decode())
            replica.stdin.flush()
        answers = [_answer(replica, processes) for replica in replicas]
        for replica in replicas:
            assert replica.stdin is not None
            replica.stdin.close()
            replica.wait(30)
    if any("failed" in answer for answer in answers):
        raise processes.failure(f"a round failed: {answers}")
    slowest = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
    return {
        "hosts": [hosts[index % len(hosts)].name for index in range(options.replicas)],
        "first_seconds": slowest[0],  # with connecting
        "seconds": slowest[1:],
        "median_seconds": statistics.median(slowest[1:]),
        "equal_bits": len({answer["digest"] for answer in answers}) == 1,
    }


def bound_seconds(options: argparse.Namespace) -> float:
    """What the link alone takes."""
    from torch import float32

    from atoll.compression.registry import codec

    num_bytes = codec(options.codec).num_bytes((options.values,), float32)
    return float(num_bytes * (2 - 2 / options.replicas) * 8 / (options.mbps * 1e6))


def _answer(replica: subprocess.Popen[str], processes: Processes) -> dict[str, Any]:
    assert replica.stdout is not None
    line = replica.stdout.readline()
    if not line:
        raise processes.failure("a replica ended")
    found: dict[str, Any] = json.loads(line)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--values", type=int, default=5_000_000)
    parser.add_argument("--codec", default="fp16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mbps", type=float, default=100.0, help="of a replica's link, for the bound")
    options = parser.parse_args()
    found = measure(options)
    bound = bound_seconds(options)
    print(f"first round, with connecting: {found['first_seconds']:.2f} s")
    print("rounds: " + ", ".join(f"{seconds:.2f}" for seconds in found["seconds"]) + " s")
    print(f"median {found['median_seconds']:.2f} s; the link's bound {bound:.2f} s; equal bits: {found['equal_bits']}")
    print(json.dumps(found | {"bound_seconds": bound, "codec": options.codec, "values": options.values}))
    return 0 if found["equal_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
