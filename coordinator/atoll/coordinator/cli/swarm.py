"""`atoll swarm`: a coordinator and its peers as separate processes on this machine.

The swarm itself trains nothing and shows nothing of the run: the coordinator shares its terminal. It starts the processes,
passes interruptions on, and sees to it that all of them have ended when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.coordinator.cli.chaos import SwarmChaos
from atoll.coordinator.cli.exits import ExitStatus, UsageError
from atoll.coordinator.cli.invite import invite_for_swarm
from atoll.coordinator.cli.local_fleet import COORDINATOR, LocalPeer, equal_peers, not_imitated, peers_of, trust_of
from atoll.coordinator.cli.options import EventsAsJson, JobOverrides, NewState, Page, TensorBoardFolder, WandbProject
from atoll.coordinator.cli.processes import Child, end_all
from atoll.coordinator.cli.report import read_history
from atoll.coordinator.cli.state import new_state, read_address
from atoll.coordinator.run_files import CACHE, LOGS
from atoll.protocol.errors import RunFailed

if TYPE_CHECKING:
    from atoll.protocol.chaos import ChaosPlan
    from atoll.protocol.job import Job

LISTEN_SECONDS = 60.0
"""From the coordinator's start until it listens; importing torch is most of it, on a cold disk."""
PATIENCE_SECONDS = 6.0
"""How long the processes may take to end by themselves once the run is over or interrupted."""
AFTERMATH_SECONDS = 15.0
"""How long the coordinator may take to end after a peer that ended because the run did."""
NOBODY_COMES_SECONDS = 180.0
"""How long a run that cannot go on waits for peers: those that were started, which take their time on a busy machine."""
POLL_SECONDS = 0.05
DEFAULT_PEERS = 4
MOST_PEERS = 64
"""More processes than that are no swarm but a load test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmSettings:
    """What to start."""

    job: Path
    peers: tuple[LocalPeer, ...]
    state: Path
    overrides: tuple[str, ...] = ()
    chaos: ChaosPlan | None = None
    page: str | None = None
    tensorboard: Path | None = None
    wandb: str | None = None
    json: bool = False
    insecure: bool = False


def command(
    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="Job file. Default: a small GPT on text.")] = None,
    peers: Annotated[int | None, typer.Option(min=1, max=MOST_PEERS, help="Number of peers. Default: 4.")] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start the peers of this fleet file, with its names, threads and memory."),
    ] = None,
    state: NewState = None,
    overrides: JobOverrides = None,
    chaos: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Have go wrong what this fault plan says: docs/chaos.md.")
    ] = None,
    page: Page = None,
    tensorboard: TensorBoardFolder = None,
    wandb: WandbProject = None,
    as_json: EventsAsJson = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="In plain text, as nothing leaves this machine.")] = False,
) -> None:
    """Trains a job on this machine: a coordinator and several peers, each a process."""
    from atoll.protocol.chaos import load_chaos
    from atoll.protocol.job import load_job

    if peers is not None and fleet is not None:
        raise UsageError("give the peers with either --peers or --fleet")
    path = job or default_job()
    loaded = load_job(path, overrides or ())
    started, changes = _from_fleet(fleet, loaded) if fleet is not None else (equal_peers(peers or DEFAULT_PEERS, _cores()), ())
    if loaded.plan.stages != "auto" and loaded.plan.stages > len(started):
        more = "add peers to the fleet file" if fleet is not None else "start more with --peers"
        raise UsageError(f"plan.stages is {loaded.plan.stages}, and each stage needs a peer: {more}")
    plan = load_chaos(chaos) if chaos is not None else None
    if plan is not None:
        plan.drawn([peer.name for peer in started])
    settings = SwarmSettings(
        job=path,
        peers=started,
        state=state or new_state(loaded.name),
        overrides=(*(overrides or ()), *changes),
        chaos=plan,
        page=page,
        tensorboard=tensorboard,
        wandb=wandb,
        json=as_json,
        insecure=insecure,
    )
    raise typer.Exit(asyncio.run(Swarm(settings).run()))


def _from_fleet(path: Path, job: Job) -> tuple[tuple[LocalPeer, ...], tuple[str, ...]]:
    """The peers of a fleet file and what they change of the job; says what one machine cannot imitate."""
    from atoll.coordinator.planning.fleet import load_fleet

    fleet = load_fleet(path)
    if len(fleet.peers) > MOST_PEERS:
        raise UsageError(
            f"{path} has {len(fleet.peers)} peers, and one machine starts {MOST_PEERS} at most: use a smaller fleet"
        )
    changes = trust_of(fleet, job)
    sentence = not_imitated(fleet, _cores())
    if sentence:
        print(f"atoll: {sentence}", file=sys.stderr)
    return peers_of(fleet, _cores()), changes


def _cores() -> int:
    return os.cpu_count() or 1


def default_job() -> Path:
    """The example that comes with Atoll: beside the package when installed, else in the checkout."""
    package = Path(__file__).parents[1] / "examples"
    checkout = Path(__file__).parents[4] / "examples"
    for folder in (package, checkout):
        if (folder / "gpt-bytes.yaml").exists():
            return folder / "gpt-bytes.yaml"
    raise UsageError("the example job is not installed: give the path of a job file")


class Swarm:
    """The processes of one run on this machine."""

    def __init__(self, settings: SwarmSettings) -> None:
        self._settings = settings
        self._children: list[Child] = []
        self._running: dict[str, Child] = {}
        self._listen = "127.0.0.1:0"
        self._interrupted = asyncio.Event()
        self._tokens: dict[str, str] = {}
        self._chaos: SwarmChaos | None = None
        if settings.chaos is not None:
            names = [peer.name for peer in settings.peers]
            self._chaos = SwarmChaos(settings.chaos, names, settings.state, self._running.get, json=settings.json)

    async def run(self) -> int:
        """Starts everything, waits for the run's end, and returns the exit status. No process is left when it returns."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt)
        patience = PATIENCE_SECONDS
        tasks: list[asyncio.Future[Any]] = []
        try:
            if self._chaos is not None:
                self._chaos.begin()
                tasks.append(asyncio.ensure_future(self._chaos.run()))
            await self._start_coordinator()
            end = asyncio.ensure_future(self._coordinate())
            tasks.append(end)
            if await self._listening(end):
                await self._start_peers()
                await self._watch(end)
        except BaseException:
            patience = 0.0
            raise
        finally:
            await _cancel(tasks)
            await end_all(self._children, patience_seconds=patience)
        return self._status()

    def _interrupt(self) -> None:
        """The first time the run ends in order; the second time at once."""
        number = signal.SIGKILL if self._interrupted.is_set() else signal.SIGINT
        self._interrupted.set()
        for child in self._children:
            child.signal(number)

    async def _start_coordinator(self) -> Child:
        settings = self._settings
        (settings.state / LOGS).mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "atoll.coordinator", "run", str(settings.job), "--listen", self._listen]
        words += ["--state", str(settings.state), "--min-peers", str(len(settings.peers)), "--held"]
        words += ["--patience-hours", str(NOBODY_COMES_SECONDS / 3600.0)]
        words += [word for override in settings.overrides for word in ("--set", override)]
        words += ["--json"] if settings.json else []
        words += ["--page", settings.page] if settings.page is not None else []
        words += ["--tensorboard", str(settings.tensorboard)] if settings.tensorboard is not None else []
        words += ["--wandb", settings.wandb] if settings.wandb is not None else []
        words += ["--insecure"] if settings.insecure else []
        variables = self._chaos.variables(COORDINATOR) if self._chaos is not None else None
        return self._started(COORDINATOR, await Child.start("the coordinator", words, hold=True, variables=variables))

    async def _coordinate(self) -> None:
        """Returns when the coordinator has ended and is not started again."""
        while True:
            coordinator = self._running[COORDINATOR]
            await coordinator.ended()
            if not await self._starts_again(coordinator):
                return
            await self._start_coordinator()

    async def _starts_again(self, child: Child) -> bool:
        """Whether a process that has ended is to be started again, once it is time for that."""
        fault = self._chaos.end_of(child) if self._chaos is not None else None
        if self._chaos is None or fault is None or fault.restart_after is None or self._interrupted.is_set():
            return False
        self._chaos.say(f"{child.name} starts again in {fault.restart_after:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._interrupted.wait(), fault.restart_after)
        return not self._interrupted.is_set()

    def _started(self, name: str, child: Child) -> Child:
        self._children.append(child)
        self._running[name] = child
        return child

    async def _listening(self, end: asyncio.Future[None]) -> bool:
        """Whether the coordinator listens; False when it ended, or we were interrupted, before it did."""
        try:
            async with asyncio.timeout(LISTEN_SECONDS):
                while not end.done() and not self._interrupted.is_set():
                    found = read_address(self._settings.state)
                    if found is not None and found.pid == self._running[COORDINATOR].pid:
                        self._listen = found.address  # there too, should it be started again
                        return True
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise RunFailed(f"the coordinator did not begin to listen within {LISTEN_SECONDS:.0f} s") from None
        return False

    async def _start_peers(self) -> None:
        for peer in self._settings.peers:
            if not self._interrupted.is_set():
                await self._start_peer(peer)

    async def _start_peer(self, peer: LocalPeer) -> Child:
        words = [sys.executable, "-m", "atoll.peer", "join", self._listen, *peer.words]
        cache = self._settings.state / CACHE
        # The machine is the same for all of them, their disks are not: a copy of a snapshot is to be one.
        words += ["--cache", str(cache), "--snapshots", str(cache / peer.name)]
        log = self._settings.state / LOGS / f"{peer.name}.log"
        words += ["--insecure"] if self._settings.insecure else []
        variables = {**(self._chaos.variables(peer.name) if self._chaos is not None else {}), **self._invited(peer)}
        return self._started(peer.name, await Child.start(peer.name, words, log=log, variables=variables))

    def _invited(self, peer: LocalPeer) -> dict[str, str]:
        """How a peer is let in: by a token of its own in its environment, which other users do not see."""
        if self._settings.insecure:
            return {}
        if peer.name not in self._tokens:
            self._tokens[peer.name] = invite_for_swarm(self._settings.state)
        return {"ATOLL_TOKEN": self._tokens[peer.name]}

    async def _watch(self, end: asyncio.Future[None]) -> None:
        """Returns at the coordinator's end, or once interrupted. Raises RunFailed when a peer is lost before the first step."""
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        watches = asyncio.gather(*(self._watch_peer(peer, end) for peer in self._settings.peers if peer.name in self._running))
        try:
            ends: list[asyncio.Future[Any]] = [end, interrupted, watches]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if watches.done():
                watches.result()
            await asyncio.wait(ends[:2], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel([interrupted, watches])

    async def _watch_peer(self, peer: LocalPeer, end: asyncio.Future[None]) -> None:
        """Starts ``peer`` again as long as the fault plan wants it, then says why it ended, unless it ended because the run
        did."""
        child = self._running[peer.name]
        status = await child.ended()
        while not end.done() and await self._starts_again(child):
            child = await self._start_peer(peer)
            status = await child.ended()
        if status >= 0:
            await asyncio.wait([end], timeout=AFTERMATH_SECONDS)
        if status == 0 or end.done() or self._interrupted.is_set() or self._is_planned(child):
            return
        if not read_history(self._settings.state).losses:
            raise RunFailed(f"{child.describe_end()}, and the run had not begun")
        print(f"atoll: {child.describe_end()}", file=sys.stderr)

    def _is_planned(self, child: Child) -> bool:
        return self._chaos is not None and self._chaos.end_of(child) is not None

    def _status(self) -> int:
        coordinator = self._running[COORDINATOR]
        for fault in self._chaos.missing() if self._chaos is not None else ():
            print(f"atoll: chaos: this did not come about: {fault.describe()}", file=sys.stderr)
        if self._interrupted.is_set():
            return ExitStatus.INTERRUPTED
        if self._is_planned(coordinator):
            state = self._settings.state
            raise RunFailed(f"the fault plan killed the coordinator for good; `atoll run JOB --state {state}` takes its run up")
        if coordinator.status is not None and coordinator.status < 0:
            raise RunFailed(coordinator.describe_end())
        return coordinator.status or ExitStatus.FINISHED


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
