"""The GPU owner's command line: ``atoll-peer join``, ``atoll-peer doctor`` and ``atoll-peer bench``."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from atoll.peer.measuring.profile import Profile
    from atoll.peer.session.joining import Where
    from atoll.peer.settings import PeerSettings

# What the commands need is imported when they run: it takes a second, in which Ctrl+C and --help must work as well.
USAGE_ERROR = 2
app = typer.Typer(
    name="atoll-peer",
    help="Lends this machine to a training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Device = Annotated[str | None, typer.Option(help="cpu, cuda:0 or mps; by default the best there is.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads for computing; by default all cores.")]
Cache = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Keep what was measured here for the next run; by default the user's cache folder."),
]
Snapshots = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep snapshots of the run's state here; by default in the --cache folder.")
]
MaxMemory = Annotated[str | None, typer.Option(help="Take no more memory than this in all, for example 8GiB.")]
MaxUpload = Annotated[str | None, typer.Option(metavar="RATE", help="Send no faster than this in all, for example 20Mbps.")]
MaxDownload = Annotated[str | None, typer.Option(metavar="RATE", help="Be sent no more than this, for example 100Mbps.")]


@app.command()
def join(
    coordinator: Annotated[
        str | None, typer.Argument(metavar="[HOST:PORT]", help="Where `atoll run` listens; or give --run.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What this peer is called; by default host name and process id.")] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="ATOLL_TOKEN", show_envvar=False, help="What `atoll invite` printed; or ATOLL_TOKEN."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file that holds the token; if it is not there yet, wait for it."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="In plain text, to a coordinator on this machine that was started so as well.")
    ] = False,
    device: Device = None,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where other peers may connect to.")] = None,
    advertise: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The address that other peers are told.")] = None,
    hive_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where hivemind listens, if the run averages with it; by default any port.")
    ] = 0,
    outbound_only: Annotated[
        bool,
        typer.Option("--outbound-only", help="Accept no connection: dial other peers, or meet them through the coordinator."),
    ] = False,
    cache: Cache = None,
    snapshots: Snapshots = None,
    run: Annotated[
        str | None, typer.Option(metavar="NAME", help="Find the run of this name in a DHT (`atoll run --dht`).")
    ] = None,
    initial_peers: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="A node of that DHT (/ip4/.../p2p/...); may be repeated.")
    ] = None,
    hand_over_seconds: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="When told to end, stay that long at most to hand layers over.")
    ] = 30.0,
    notice_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Ask this all the time whether the machine is about to be taken away, and leave then."
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="ATOLL_METRICS",
            show_envvar=False,
            help="Show this peer's numbers there to Prometheus; :7002 is all addresses. Or ATOLL_METRICS.",
        ),
    ] = None,
    wait: Annotated[
        str, typer.Option(metavar="TIME", help="Look that long for a coordinator that is not there, or is gone, then end.")
    ] = "1800s",
) -> None:
    """Join the run of the coordinator at HOST:PORT and work for it until it ends."""
    from atoll.peer.measuring.profile import choose_device
    from atoll.peer.session.joining import Where
    from atoll.peer.session.notice import notice_url_of_flag
    from atoll.peer.settings import (
        Patience,
        PeerSettings,
        default_cache,
        default_name,
        rate_of_flag,
        seconds_of_flag,
        size_of_flag,
    )
    from atoll.protocol.channel import parse_address
    from atoll.protocol.errors import JobError
    from atoll.protocol.fault_points import FaultPoints

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    where = Where.of_flags(coordinator, run, initial_peers or ())
    if outbound_only and (listen or advertise):
        raise JobError("--outbound-only", "a peer that accepts no connection has nothing to --listen on or to --advertise")
    settings = PeerSettings(
        coordinator=where.address,
        name=name or default_name(),
        device=choose_device(device),
        threads=threads,
        memory_bytes=None if max_memory is None else size_of_flag(max_memory, "--max-memory"),
        listen=None if listen is None else str(parse_address(listen, "--listen")),
        advertise=None if advertise is None else str(parse_address(advertise, "--advertise")),
        hive_port=hive_port,
        outbound_only=outbound_only,
        cache=cache or default_cache(),
        snapshots=snapshots,
        token=token or None,
        token_file=token_file,
        insecure=insecure,
        max_upload=None if max_upload is None else rate_of_flag(max_upload, "--max-upload"),
        max_download=None if max_download is None else rate_of_flag(max_download, "--max-download"),
        chaos=FaultPoints.from_environment(os.environ),
        hand_over_seconds=hand_over_seconds,
        notice_url=None if notice_url is None else notice_url_of_flag(notice_url),
        metrics=metrics or None,
        patience=Patience(end=seconds_of_flag(wait, "--wait")),
    )
    raise typer.Exit(asyncio.run(_run(settings, where)))


@app.command()
def doctor(
    coordinator: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where `atoll run` listens.")],
    name: Annotated[str | None, typer.Option(help="What this peer is called when it joins.")] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="ATOLL_TOKEN", show_envvar=False, help="What `atoll invite` printed; or ATOLL_TOKEN."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="In plain text, to a coordinator on this machine.")] = False,
    device: Device = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where other peers may connect to.")] = None,
    advertise: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The address that other peers are told.")] = None,
    cache: Cache = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """Look at all that a peer here needs to work for the run at HOST:PORT, and say what mends what is bad (exit status 1)."""
    from atoll.peer.doctor.diagnosis import is_fit
    from atoll.peer.doctor.table import show
    from atoll.peer.measuring.profile import choose_device
    from atoll.peer.settings import PeerSettings, default_cache, default_name
    from atoll.protocol.channel import parse_address
    from atoll.protocol.errors import JobError

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if token and not name:
        raise JobError("--name", "a token is for the peer that comes with it first; give the name that this one joins under")
    settings = PeerSettings(
        coordinator=parse_address(coordinator),
        name=name or default_name(),
        device=choose_device(device),
        listen=None if listen is None else str(parse_address(listen, "--listen")),
        advertise=None if advertise is None else str(parse_address(advertise, "--advertise")),
        cache=cache or default_cache(),
        token=token or None,
        insecure=insecure,
    )
    raise typer.Exit(0 if is_fit(asyncio.run(show(settings, as_json=as_json))) else 1)


@app.command()
def bench(
    device: Device = None,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    cache: Cache = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Print what a coordinator would be told about this machine: speed and memory, measured."""
    from atoll.peer.measuring.handling import handling_seconds
    from atoll.peer.measuring.profile import choose_device, measure
    from atoll.peer.settings import default_cache, size_of_flag

    cap = None if max_memory is None else size_of_flag(max_memory, "--max-memory")
    profile = measure(choose_device(device), threads=threads, memory_cap_bytes=cap, cache=cache or default_cache())
    handling = asyncio.run(handling_seconds())
    shown = dataclasses.asdict(profile) | {"handling_seconds": handling}
    print(json.dumps(shown) if as_json else _describe(profile, handling), flush=True)


def main() -> None:
    """Entry point of ``atoll-peer``: errors in one sentence, exit status 2 for bad usage."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its log lines repeat, in its own words, what errors here say
    from atoll.peer.computing.no_compiler import leave_out_compiler
    from atoll.peer.stage.allocator import begin_anew_if_need_be, keep_memory_for_tensors
    from atoll.protocol.errors import JobError

    begin_anew_if_need_be()
    keep_memory_for_tensors()
    leave_out_compiler()
    signal.signal(signal.SIGTERM, _end_early)
    try:
        app()
    except JobError as error:
        print(error, file=sys.stderr)
        _end(USAGE_ERROR)
    except SystemExit as ending:
        _end(ending.code if isinstance(ending.code, int) else 1)


async def _run(settings: PeerSettings, where: Where) -> int:
    """Finds the run, if need be, and works for it; the exit status."""
    from atoll.peer.session.values import ExitCode
    from atoll.protocol.errors import AtollError, JobError

    try:
        async with where.found(settings) as complete:
            return await _work(complete)
    except JobError:
        raise
    except AtollError as error:
        print(error, file=sys.stderr)
        return ExitCode.FAILED


async def _work(settings: PeerSettings) -> int:
    """Runs the peer with signals turned into a leave; the exit status."""
    from atoll.peer.daemon import Peer
    from atoll.peer.session.values import ExitCode
    from atoll.protocol.open_files import allow_many_connections

    allow_many_connections()
    peer = Peer(settings)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, peer.leave_in_order, "interrupted", ExitCode.INTERRUPTED)
    loop.add_signal_handler(signal.SIGTERM, peer.leave_in_order, "told to end", ExitCode.FINISHED)
    outcome = await peer.run()
    print(outcome.reason, file=sys.stderr)
    return outcome.exit_code


def _end(status: int) -> NoReturn:
    """Ends the process at once: taking torch down takes seconds on a busy machine, and an operator may still be running."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_early(number: int, frame: object) -> None:
    """SIGTERM before there is anything to leave."""
    sys.exit(0)


def _describe(profile: Profile, handling: float) -> str:
    return "\n".join(
        [
            f"device        {profile.device}, {profile.threads} threads",
            f"speed         {profile.flops_per_second / 1e9:.1f} GFLOP/s (fp32, forward and backward)",
            f"free memory   {profile.memory_bytes / 2**30:.2f} GiB",
            f"free disk     {profile.disk_bytes / 2**30:.2f} GiB where the cache lies",
            f"in use        {profile.resident_bytes / 2**20:.0f} MiB by this process",
            f"messages      one end of a small one keeps a core busy for {handling * 1e3:.2f} ms",
        ]
    )
