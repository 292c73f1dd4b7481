"""Messages that arrived before they are due: kept by their key, dropped with their generation. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.protocol.ids import Generation, PeerId, StepNumber
from atoll.protocol.messages import Message, MessageKey


class Mailbox:
    """Arrived and not yet used messages, each with the peer that sent it (None: the coordinator).

    Upstream stages and the coordinator run ahead: batches and activations of the next step, and after a void of the next
    generation, are here before this peer hears that it starts. Senders are bounded by their credit, so the box is too.
    """

    def __init__(self) -> None:
        self._messages: dict[MessageKey, tuple[PeerId | None, Message]] = {}
        self._oldest = Generation(0)

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, sender: PeerId | None, message: Message) -> bool:
        """Keeps a message; False when its generation is over."""
        if message.key.generation < self._oldest:
            return False
        self._messages[message.key] = (sender, message)
        return True

    def take(self, key: MessageKey) -> tuple[PeerId | None, Message] | None:
        """Removes and returns the message with this key, if it is here."""
        return self._messages.pop(key, None)

    def keys_of(self, generation: Generation, step: StepNumber, *, evaluation: bool) -> Iterator[MessageKey]:
        """The keys of what is here for one step."""
        for key in self._messages:
            if (key.generation, key.step, key.evaluation) == (generation, step, evaluation):
                yield key

    def drop_before(self, generation: Generation) -> None:
        """Forgets every message of a generation older than this one, and refuses such from now on."""
        self._oldest = max(self._oldest, generation)
        self._messages = {key: kept for key, kept in self._messages.items() if key.generation >= generation}

    def drop_step(self, generation: Generation, step: StepNumber, *, evaluation: bool) -> None:
        """Forgets what is left of a step that is over."""
        for key in tuple(self.keys_of(generation, step, evaluation=evaluation)):
            del self._messages[key]
