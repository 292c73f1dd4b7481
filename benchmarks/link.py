"""What one link of Atoll carries, beside a plain TCP stream between the same two hosts, in turns.

    python benchmarks/link.py          between the first two hosts of ATOLL_TEST_HOSTS, or over loopback where that is not set

A transfer lasts until the receiver has said that all of it is there, so a round trip is part of it, on both sides. *busy*
follows another transfer at once, *idle* a pause. With --tls the link is protected as a run's are, and the same in plain text is
measured as well, in turns with both. Prints a table and then, as the last line, the same as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from atoll.coordinator.identity.authority import Authority
from contestants import ROOT, Failed, Processes
from setting import LOOPBACK, hosts_of_environment

ENDS = str(ROOT / "benchmarks" / "link_ends.py")


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Both ends as processes, from start to end."""
    hosts = hosts_of_environment() or [LOOPBACK]
    receiving, sending = hosts[1 % len(hosts)], hosts[0]
    folder = Path(tempfile.mkdtemp(prefix="atoll-benchmark-link-"))
    processes = Processes(folder)
    secured = ["--identity", made_identity(folder)] if options.pop("tls") else []
    with processes.limited():
        words = [ENDS, "receive", "--host", receiving.address, *secured]
        receiver = processes.start("receiver", receiving, words, stdin=subprocess.PIPE)
        assert receiver.stdout is not None
        assert receiver.stdin is not None
        where = json.loads(receiver.stdout.readline() or "{}")
        if not where:
            raise processes.failure("the receiving end did not begin to listen")
        words = [ENDS, "send", "--host", sending.address, *secured]
        words += [word for name, address in where.items() for word in (f"--{name}", address)]
        words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        sender = processes.start("sender", sending, words)
        assert sender.stdout is not None
        output = sender.stdout.read().strip()
        receiver.stdin.close()
    if not output:
        raise processes.failure("the sending end did not finish")
    return {"hosts": [sending.name, receiving.name], **json.loads(output)}


def made_identity(folder: Path) -> str:
    """An authority with which both ends make what they show."""
    Authority.open(folder / "identity", "0" * 32, datetime.datetime.now(datetime.UTC))
    return str(folder / "identity")


def rates(measured: dict[str, Any], options: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Median Mbps by what was measured, of all sides, and the ratios."""
    found = {}
    for what in measured["link"][0]:
        megabits = options["bytes" if what.startswith("long") else "short_bytes"] * 8 / 1e6
        sides = [side for side in ("link", "plain", "tcp") if side in measured]
        speed = {side: megabits / statistics.median(one[what] for one in measured[side]) for side in sides}
        found[what] = {f"{side}_mbps": one for side, one in speed.items()}
        found[what] |= {("ratio" if side == "tcp" else "of_plain"): speed["link"] / speed[side] for side in sides[1:]}
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """The figures for people."""
    columns = {"link_mbps": "Atoll, Mbps", "plain_mbps": "plain, Mbps", "tcp_mbps": "TCP, Mbps"}
    columns |= {"ratio": "Atoll/TCP", "of_plain": "Atoll/plain"}
    used = [column for column in columns if all(column in one for one in found.values())]
    lines = [" ".join([f"{'transfer':16}", *(f"{columns[column]:>12}" for column in used)])]
    for what, one in found.items():
        lines.append(" ".join([f"{what:16}", *(f"{one[column]:12.{1 if column.endswith('mbps') else 3}f}" for column in used)]))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=48 * 2**20, help="of a long transfer")
    parser.add_argument("--short-bytes", type=int, default=4 * 2**20, help="of a short one")
    parser.add_argument("--message-bytes", type=int, default=2**20, help="a transfer consists of messages of this size")
    parser.add_argument("--idle-seconds", type=float, default=5.0, help="the pause")
    parser.add_argument("--tls", action="store_true", help="protect the link as a run does")
    options = vars(parser.parse_args())
    try:
        measured = measure(dict(options))
    except Failed as failure:
        print(f"link: {failure}", file=sys.stderr)
        return 1
    found = rates(measured, options)
    print(table(found))
    print(json.dumps({"setting": options, "results": found, **measured}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
