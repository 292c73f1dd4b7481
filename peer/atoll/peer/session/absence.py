"""What a peer still has of a run whose coordinator it lost, from the loss until that is of use or of none. Pure."""

from __future__ import annotations

from atoll.peer.session.values import Compute, GoBack, Instruction, LongAlone, SessionEvent
from atoll.peer.stage.events import StateHeld, WriteSnapshot
from atoll.protocol.ids import Generation


class Absence:
    """``held`` is None until computing has said what there is, and once that has found its use."""

    def __init__(self) -> None:
        self.held: StateHeld | None = None
        self._reason = ""
        self._run_id = ""
        self._generation = Generation(0)

    def begin(self, reason: str, run_id: str, generation: Generation) -> None:
        """The connection is lost because of ``reason``; the peer last heard of ``generation`` of the run called ``run_id``."""
        self.held = None
        self._reason, self._run_id, self._generation = reason, run_id, generation

    def end(self) -> None:
        """What was held counts as every other state does, or is dropped."""
        self.held = None

    def lost_again(self, reason: str) -> list[Instruction]:
        """The new connection, too, is lost before anybody said welcome."""
        self._reason = reason
        return self._go_back()

    def handle(self, event: SessionEvent) -> list[Instruction]:
        """What happens meanwhile; most of it is of what was before."""
        match event:
            case StateHeld():
                self.held = event
                return self._go_back()
            case LongAlone() if self.held is not None and self.held.step > 0:
                return [Compute(WriteSnapshot())]
        return []

    def _go_back(self) -> list[Instruction]:
        if self.held is None:
            return []  # computing has still to say what there is
        return [GoBack(reason=self._reason, run_id=self._run_id, generation=self._generation, held=self.held)]
