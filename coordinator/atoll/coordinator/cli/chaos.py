"""The part of `atoll swarm` in a fault plan: tells each process of it, starts killed ones again, lets frozen ones go on, and
kills and freezes at the times that no process knows of itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.coordinator.cli.processes import Child
from atoll.coordinator.cli.view import write_line
from atoll.coordinator.run_files import CHAOS
from atoll.protocol.chaos import ChaosPlan, Fault
from atoll.protocol.fault_points import VARIABLE, Armed, Fired
from atoll.protocol.folders import paths_in

POLL_SECONDS = 0.05


class SwarmChaos:
    """``running`` finds the process that runs under a name. Notes go to a folder in ``state``, where what happened stays."""

    def __init__(
        self, plan: ChaosPlan, peers: Sequence[str], state: Path, running: Callable[[str], Child | None], *, json: bool
    ) -> None:
        self._faults = dict(enumerate(plan.drawn(peers)))
        self._folder = state / CHAOS
        self._running = running
        self._json = json
        self._began = time.monotonic()
        self._starts: dict[str, int] = {}
        self._told: set[int] = set()
        self._frozen: dict[int, Child] = {}

    def begin(self) -> None:
        """What an earlier swarm noted in the same folder does not count."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for note in paths_in(self._folder, "*.json"):
            note.unlink()

    def variables(self, process: str) -> dict[str, str]:
        """What the process that is started now under this name is to find in its environment."""
        starts = self._starts.get(process, 0)
        self._starts[process] = starts + 1
        armed = Armed(
            process=process,
            fired=self._folder,
            faults={
                number: fault for number, fault in self._faults.items() if fault.peer in (None, process) and not fault.of_swarm
            },
            elapsed_seconds=time.monotonic() - self._began,
            starts=starts,
        )
        return {VARIABLE: armed.to_json()}

    async def run(self) -> None:
        """Does what is due until it is cancelled; then lets every frozen process go on."""
        timed = sorted((fault.at or 0.0, number) for number, fault in self._faults.items() if fault.of_swarm)
        try:
            while True:
                elapsed = time.monotonic() - self._began
                timed = [(at, number) for at, number in timed if at > elapsed or not self._strike(number)]
                self._look()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for child in self._frozen.values():
                child.signal(signal.SIGCONT)

    def end_of(self, child: Child) -> Fault | None:
        """The fault that ended the process, if one did."""
        if child.status != -signal.SIGKILL:
            return None
        self._look()
        fired = {one.pid: self._faults[one.number] for one in Fired.all_in(self._folder) if self._kills(one)}
        return fired.get(child.pid)

    def missing(self) -> list[Fault]:
        """The faults that did not come about."""
        happened = {fired.number for fired in Fired.all_in(self._folder)}
        return [fault for number, fault in self._faults.items() if number not in happened]

    def say(self, sentence: str) -> None:
        print(f"atoll: chaos: {sentence}", file=sys.stderr, flush=True)

    def _kills(self, fired: Fired) -> bool:
        return self._faults[fired.number].fault == "kill"

    def _strike(self, number: int) -> bool:
        """Kill or freeze the victim from outside; False while it does not run."""
        fault = self._faults[number]
        assert fault.peer is not None, "a fault at a time has a name"
        child = self._running(fault.peer)
        if child is None or child.status is not None:
            return False
        Fired(number=number, process=fault.peer, pid=child.pid, wall_seconds=time.time()).claim(self._folder)
        child.signal(signal.SIGKILL if fault.fault == "kill" else signal.SIGSTOP)
        return True

    def _look(self) -> None:
        """Tell of what has happened since, and note who is to go on, and when."""
        for fired in Fired.all_in(self._folder):
            if fired.number in self._told:
                continue
            self._told.add(fired.number)
            fault = self._faults[fired.number]
            self._tell(fired, fault)
            child = self._running(fired.process)
            if fault.fault == "freeze" and child is not None:
                assert fault.seconds is not None
                self._frozen[fired.number] = child
                left = fault.seconds - (time.time() - fired.wall_seconds)
                asyncio.get_running_loop().call_later(max(0.0, left), self._thaw, fired.number)

    def _thaw(self, number: int) -> None:
        with contextlib.suppress(KeyError):
            child = self._frozen.pop(number)
            child.signal(signal.SIGCONT)
            self.say(f"{child.name} goes on")

    def _tell(self, fired: Fired, fault: Fault) -> None:
        where = f", step {fired.step}" if fired.step else ""
        what = fault.fault.replace("_", " ")
        self.say(f"{what} of {fired.process}" + (f": {fired.phase}{where}" if fired.phase else ""))
        if self._json:
            event = {"event": "chaos", "fault": fault.fault, "process": fired.process, "phase": fired.phase, "step": fired.step}
            write_line(json.dumps({**event, "time": fired.wall_seconds}))
