"""Where the coordinator of a run stands, for a fault plan: from the events that it takes and the instructions that it carries
out to phases. Decides nothing, and does nothing unless the process is armed."""

from __future__ import annotations

from atoll.coordinator.run.events import PeerJoined, RunEvent, SnapshotTaken, StageReported, StateMoved
from atoll.coordinator.run.instructions import Assign, Instruction, MakePlan, SendCommit, StartStep, WriteCommit
from atoll.protocol.fault_points import FaultPoints


class CoordinatorChaos:
    """Told of everything in its order; ``points`` do what the plan wants."""

    def __init__(self, points: FaultPoints) -> None:
        self._points = points
        self._next_step = 1

    def taking(self, event: RunEvent) -> None:
        """The event is about to be handled."""
        match event:
            case PeerJoined():
                self._points.joining()
            case StageReported(evaluation=False):
                self._points.reached("backward", step=event.step)
            case SnapshotTaken(failure=""):
                self._points.reached("snapshotting", step=event.step)
            case StateMoved():
                self._points.reached("transferring", step=self._next_step)

    def carrying_out(self, instruction: Instruction) -> None:
        """The instruction is about to be carried out."""
        match instruction:
            case MakePlan():
                self._points.reached("probing")
            case Assign():
                self._next_step = instruction.committed + 1
                self._points.reached("loading", step=self._next_step)
            case WriteCommit():
                self._next_step = instruction.step + 1
                self._points.reached("waiting for commit", step=instruction.step)
            case SendCommit():
                self._points.reached("committing", step=instruction.step)

    def carried_out(self, instruction: Instruction) -> None:
        """The instruction has been carried out."""
        if isinstance(instruction, StartStep) and not instruction.evaluation:
            self._points.reached("forward", step=instruction.step)
