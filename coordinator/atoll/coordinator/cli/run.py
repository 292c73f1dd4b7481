"""`atoll run`: one coordinator, from the job file to the summary."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from atoll.coordinator.cli.exits import ExitStatus, UsageError
from atoll.coordinator.cli.interruption import Interruption
from atoll.coordinator.cli.invite import keep_invitation
from atoll.coordinator.cli.options import (
    DhtListen,
    EventsAsJson,
    InitialPeers,
    JobOverrides,
    NewState,
    Page,
    TensorBoardFolder,
    WandbProject,
)
from atoll.coordinator.cli.report import read_history, summary_lines, write_curve
from atoll.coordinator.cli.state import new_state
from atoll.coordinator.cli.view import View, open_view
from atoll.coordinator.reading import read_told
from atoll.coordinator.run_files import CURVE, LOGS, WEIGHTS
from atoll.protocol.errors import RunFailed
from atoll.protocol.open_files import allow_many_connections

if TYPE_CHECKING:
    from atoll.coordinator.announcing import Announcing, AnnouncingOptions
    from atoll.coordinator.cli.page.site import Site
    from atoll.coordinator.events import Event
    from atoll.coordinator.server import Coordinator
    from atoll.protocol.job import Job

REFRESH_SECONDS = 0.5
LOG_BYTES = 16 * 2**20
EARLIER_LOGS = 3
"""Files of that size that are kept beside the present one: a run may last for months."""
MAX_SAMPLED_BYTES = 512 * 1024 * 1024
"""Weights of larger models are not sampled unasked: building one takes twice that memory on the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `atoll run` was asked for."""

    job: Job
    listen: str
    state: Path
    min_peers: int
    json: bool
    held: bool
    insecure: bool = False
    invite_to: Path | None = None
    resume: str | None = None
    page: str | None = None
    tensorboard: Path | None = None
    wandb: str | None = None
    announcing: AnnouncingOptions | None = None
    patience_seconds: float = 24 * 3600.0


def command(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where peers reach this coordinator.")] = "127.0.0.1:0",
    state: NewState = None,
    min_peers: Annotated[int, typer.Option(min=1, help="Wait for that many peers before the first plan.")] = 1,
    resume: Annotated[
        str | None,
        typer.Option(metavar="DIR-or-URL", help="Go on from the newest snapshot in a store, or in that of a run's folder."),
    ] = None,
    overrides: JobOverrides = None,
    as_json: EventsAsJson = False,
    page: Page = None,
    tensorboard: TensorBoardFolder = None,
    wandb: WandbProject = None,
    dht: Annotated[bool, typer.Option("--dht", help="Let peers find this run by its name: announce it in a DHT.")] = False,
    initial_peers: InitialPeers = None,
    dht_listen: DhtListen = None,
    patience_hours: Annotated[
        float, typer.Option(min=0.0, help="How long a run that cannot go on waits for peers before it ends.")
    ] = 24.0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text and no invitations, for peers on this machine that say so too.")
    ] = False,
    invite_to: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a token there for as many peers as read it, for the life of the run."),
    ] = None,
    held: Annotated[bool, typer.Option("--held", hidden=True, help="End when standard input closes.")] = False,
) -> None:
    """Coordinates one run: waits for peers, places the model, trains, and writes the weights."""
    from atoll.coordinator.announcing import announcing_options
    from atoll.protocol.job import load_job

    if insecure and invite_to is not None:
        raise UsageError("a run with --insecure needs no invitations: leave --invite-to away")
    loaded = load_job(job, overrides or ())
    options = RunOptions(
        job=loaded,
        listen=listen,
        state=state or new_state(loaded.name),
        min_peers=min_peers,
        json=as_json,
        held=held,
        insecure=insecure,
        invite_to=invite_to,
        resume=resume,
        page=page,
        tensorboard=tensorboard,
        wandb=wandb,
        announcing=announcing_options(listen, dht_listen, initial_peers or ()) if dht else None,
        patience_seconds=3600.0 * patience_hours,
    )
    raise typer.Exit(asyncio.run(run_job(options)))


async def run_job(options: RunOptions) -> ExitStatus:
    """Runs the job to its end and returns the exit status; raises RunFailed with the reason when it fails."""
    from atoll.coordinator.run.deadlines import Deadlines
    from atoll.coordinator.server import Coordinator  # torch is slow to import
    from atoll.coordinator.settings import CoordinatorSettings
    from atoll.protocol.fault_points import FaultPoints

    allow_many_connections()
    _log_to(options.state / LOGS / "coordinator.log")
    trackers = await asyncio.to_thread(open_trackers, options)
    view = open_view(run=options.job.name, steps=options.job.training.steps, json=options.json)
    settings = CoordinatorSettings(
        job=options.job,
        listen=options.listen,
        state=options.state,
        min_peers=options.min_peers,
        insecure=options.insecure,
        chaos=FaultPoints.from_environment(os.environ),
        resume=options.resume,
        deadlines=Deadlines(waiting_seconds=options.patience_seconds),
    )
    site = open_site(options) if options.page is not None else None
    views: list[View | Site] = [view, *trackers] if site is None else [view, *trackers, site]
    coordinator = Coordinator(settings, on_event=functools.partial(_tell, views))
    interruption = Interruption(coordinator.request_stop)
    interruption.watch_signals()
    if options.held:
        interruption.watch_standard_input()
    announcing: Announcing | None = None
    try:
        address = await coordinator.start()
        print(f"listening on {address}, the run is kept in {options.state}", file=_people(options))
        if site is not None:
            print(f"the run's page is {await site.start(coordinator)}", file=_people(options))
        if options.invite_to is not None:
            await asyncio.to_thread(keep_invitation, options.invite_to, options.state)
        if not options.insecure:
            print(f"`atoll invite --state {options.state}` prints the line by which a peer joins", file=_people(options))
        announcing = await _announce(options, coordinator, address)
        async with _refreshing(views, coordinator):
            outcome = await coordinator.run()
    finally:
        if announcing is not None:
            await announcing.close()
        view.close()
        for tracker in trackers:
            await asyncio.to_thread(tracker.close)
        if site is not None:
            await site.stop()
    if interruption.happened:
        print(f"atoll: {outcome.reason}", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    await asyncio.to_thread(conclude, options, finished=outcome.finished)
    if outcome.stopped:
        print(f"atoll: {outcome.reason}; `atoll run` with --state {options.state} goes on with it", file=sys.stderr)
    elif not outcome.finished:
        raise RunFailed(outcome.reason)
    return ExitStatus.FINISHED


def conclude(options: RunOptions, *, finished: bool) -> None:
    """Draws the loss curve, and shows what the run did and where it is."""
    history = read_history(options.state)
    if not history.losses:
        return
    write_curve(history, options.state / CURVE, options.job.name)
    say = functools.partial(print, file=_people(options), flush=True)
    say()
    for line in summary_lines(history, options.state):
        say(line)
    if finished and (options.state / WEIGHTS).stat().st_size <= MAX_SAMPLED_BYTES:
        from atoll.coordinator.cli.generate import sample

        text = sample(options.job, options.state / WEIGHTS)
        if text is not None:
            say(f"\na sample of what the model writes:\n\n{text}\n")


def _people(options: RunOptions) -> TextIO:
    """Where text for people goes: with --json, standard output is for events alone."""
    return sys.stderr if options.json else sys.stdout


def open_site(options: RunOptions) -> Site:
    """The page of a run, which knows what the run did before."""
    from atoll.coordinator.cli.page.site import Site  # aiohttp is slow to import, and most runs have no page

    assert options.page is not None
    return Site(
        listen=options.page,
        state=options.state,
        steps=options.job.training.steps,
        before=read_told(options.state),
    )


def open_trackers(options: RunOptions) -> list[View]:
    """Where else the curves go. Raises UsageError and ResourceError."""
    if options.tensorboard is None and options.wandb is None:
        return []
    from atoll.coordinator.cli.tracking import TensorBoard, Tracker, WeightsAndBiases

    trackers: list[View] = []
    if options.tensorboard is not None:
        trackers.append(Tracker(TensorBoard(options.tensorboard)))
    if options.wandb is not None:
        config = options.job.model_dump(mode="json")
        trackers.append(Tracker(WeightsAndBiases(options.wandb, name=options.job.name, state=options.state, config=config)))
    return trackers


async def _announce(options: RunOptions, coordinator: Coordinator, address: str) -> Announcing | None:
    """Has the run found by its name, if that is wanted."""
    if options.announcing is None:
        return None
    from atoll.coordinator.announcing import Announcing

    announcing = await Announcing.start(options.announcing, options.job.name, coordinator.run_id, options.state, address)
    words = f"atoll-peer join --run {options.job.name} --initial-peers {announcing.initial}"
    print(f"peers find this run with `{words}`", file=_people(options), flush=True)
    return announcing


def _tell(views: Sequence[View | Site], event: Event) -> None:
    for view in views:
        view.event(event)


@contextlib.asynccontextmanager
async def _refreshing(views: Sequence[View | Site], coordinator: Coordinator) -> AsyncIterator[None]:
    async def refresh() -> None:
        while True:
            status = coordinator.status()
            for view in views:
                view.refresh(status)
            await asyncio.sleep(REFRESH_SECONDS)

    task = asyncio.ensure_future(refresh())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=EARLIER_LOGS)
    logging.basicConfig(handlers=[handler], level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
