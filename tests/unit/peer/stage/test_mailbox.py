"""Messages that are early, late and never."""

from __future__ import annotations

from atoll.peer.stage.mailbox import Mailbox
from atoll.protocol.ids import Generation, MicrobatchIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.messages import Kind, Message, MessageKey

SENDER = PeerId("ann")


def message(generation: int, step: int, microbatch: int = 0, *, evaluation: bool = False) -> Message:
    key = MessageKey(
        generation=Generation(generation),
        step=StepNumber(step),
        microbatch=MicrobatchIndex(microbatch),
        kind=Kind.ACTIVATION,
        source=StageIndex(0),
        target=StageIndex(1),
        evaluation=evaluation,
    )
    return Message(key=key)


def test_a_message_is_taken_once() -> None:
    box = Mailbox()
    early = message(1, 2)
    assert box.put(SENDER, early)
    assert box.take(early.key) == (SENDER, early)
    assert box.take(early.key) is None


def test_steps_evaluations_and_generations_are_apart() -> None:
    box = Mailbox()
    kept = [message(1, 2), message(1, 2, evaluation=True), message(1, 3), message(2, 2)]
    for one in kept:
        box.put(SENDER, one)
    found = [list(box.keys_of(Generation(g), StepNumber(s), evaluation=e)) for g, s, e in [(1, 2, False), (1, 2, True)]]
    assert found == [[kept[0].key], [kept[1].key]]


def test_newer_generations_survive_a_void_and_older_ones_are_refused() -> None:
    box = Mailbox()
    box.put(SENDER, message(1, 2))
    box.put(SENDER, message(2, 2))
    box.drop_before(Generation(2))
    assert len(box) == 1
    assert not box.put(SENDER, message(1, 3))
    assert box.take(message(2, 2).key) is not None


def test_a_finished_step_leaves_the_next_one_alone() -> None:
    box = Mailbox()
    for one in (message(1, 2, 0), message(1, 2, 1), message(1, 3)):
        box.put(SENDER, one)
    box.drop_step(Generation(1), StepNumber(2), evaluation=False)
    assert len(box) == 1
