"""Measuring a kind of segment: it always answers, in bounded time, and leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch

from atoll.peer.measuring.measurement_cache import MeasurementCache
from atoll.peer.measuring.measuring import Measuring, MeasuringSurroundings, read_task
from atoll.peer.measuring.measuring_queue import MeasuringQueue
from atoll.peer.stage.events import Measured
from atoll.peer.stage.stage import Stage
from atoll.peer.stage.work_seconds import WorkSeconds
from atoll.protocol.measurement import REQUEST_TENSOR
from atoll.protocol.messages import Message
from support.hand_models import HandModel, convolutional, transformer
from support.measurements import SETTINGS, kinds_in, measurements_of

MEMORY = 10**9


def messages_of(model: HandModel, *, limit_seconds: float = 0.05) -> list[Message]:
    return measurements_of(model.graph, model.sample(2, torch.Generator().manual_seed(0)), limit_seconds=limit_seconds)


class Steady:
    """A clock on which it is later by the given times, in turn, whenever it is read."""

    def __init__(self, durations: Iterator[float]) -> None:
        self._durations = durations
        self._now = 0.0

    def __call__(self) -> float:
        self._now += next(self._durations)
        return self._now


def measured_by(clock: Callable[[], float], limit_seconds: float) -> tuple[WorkSeconds, int]:
    """What is found for a block of a transformer, and in how many pieces."""
    message = messages_of(transformer(), limit_seconds=limit_seconds)[1]
    surroundings = MeasuringSurroundings(device=torch.device("cpu"), memory_bytes=MEMORY, clock=clock)
    measuring = Measuring(read_task(message), surroundings)
    pieces = 0
    while measuring.seconds is None:
        measuring.advance()
        pieces += 1
    return measuring.seconds, pieces


class Queue:
    """A queue and what it answered."""

    def __init__(self, cache: Path | None = None, refusal: str = "") -> None:
        self.answers: list[Measured] = []
        self.queue = MeasuringQueue(device="cpu", cache=MeasurementCache(cache), notify=self.answers.append, refusal=refusal)

    def ask(self, *messages: Message, memory_bytes: int = MEMORY) -> list[Measured]:
        """Everything that was answered once nothing is left to do."""
        for message in messages:
            self.queue.add(message, memory_bytes)
        while self.queue.advance():
            pass
        return self.answers


@pytest.mark.parametrize(
    "model",
    [transformer(), transformer(tied=True, dropout=0.1), convolutional()],
    ids=["transformer", "tied", "convolutional"],
)
def test_every_kind_is_measured(model: HandModel) -> None:
    answers = Queue().ask(*messages_of(model))
    assert [answer.kind for answer in answers] == [kind.fingerprint for kind in kinds_in(model.graph).kinds]
    for answer in answers:
        assert answer.failure == ""
        assert answer.seconds is not None
        assert min(answer.seconds.forward, answer.seconds.backward, answer.seconds.update) > 0.0
        assert not answer.cached


@pytest.mark.parametrize(
    "settings",
    [replace(SETTINGS, precision="bf16"), replace(SETTINGS, optimizer=replace(SETTINGS.optimizer, name="sgd"), clips=False)],
    ids=["bf16", "sgd"],
)
def test_it_is_run_as_it_will_be(settings: object) -> None:
    model = transformer()
    inputs = model.sample(2, torch.Generator().manual_seed(0))
    answers = Queue().ask(*measurements_of(model.graph, inputs, settings))  # type: ignore[arg-type]
    assert {answer.failure for answer in answers} == {""}


def test_a_slow_peer_measures_once() -> None:
    found, pieces = measured_by(Steady(repeat(100.0)), limit_seconds=0.1)
    assert (found.forward, found.backward, found.update) == (100.0, 100.0, 100.0)
    assert pieces < 20


def test_a_fast_peer_measures_often_but_not_for_ever() -> None:
    found, pieces = measured_by(Steady(repeat(1e-6)), limit_seconds=10.0)
    assert found.forward == pytest.approx(1e-6)
    assert 100 < pieces < 500


def test_interruptions_do_not_count() -> None:
    def sometimes() -> Iterator[float]:
        while True:
            yield from (*repeat(1e-3, 12), 5.0)

    found, _ = measured_by(Steady(sometimes()), limit_seconds=1e6)
    assert (found.forward, found.backward, found.update) == pytest.approx((1e-3, 1e-3, 1e-3))


def test_the_second_time_it_is_known(tmp_path: Path) -> None:
    messages = messages_of(transformer())
    first = Queue(tmp_path).ask(*messages)
    again = Queue(tmp_path).ask(*messages)
    assert [answer.seconds for answer in again] == [answer.seconds for answer in first]
    assert all(answer.cached for answer in again)


def test_what_could_not_be_measured_is_not_remembered(tmp_path: Path) -> None:
    messages = messages_of(transformer())
    assert all(answer.failure for answer in Queue(tmp_path).ask(*messages, memory_bytes=1000))
    assert not any(answer.cached or answer.failure for answer in Queue(tmp_path).ask(*messages))


def test_a_graph_beyond_the_memory_is_refused_in_a_sentence() -> None:
    answer = Queue().ask(messages_of(transformer())[1], memory_bytes=1000)[0]
    assert answer.seconds is None
    assert "more than the limit of 1000" in answer.failure


def test_a_microbatch_beyond_the_memory_is_refused_in_a_sentence() -> None:
    message = messages_of(transformer())[1]
    message = replace(message, numbers=dict.fromkeys(message.numbers, 1e6))
    (answer,) = Queue().ask(message, memory_bytes=10**7)
    assert "too large for this peer" in answer.failure


def without_inputs(message: Message) -> Message:
    return replace(message, tensors=message.tensors[:1])


def without_request(message: Message) -> Message:
    return replace(message, tensors=message.tensors[1:])


def with_nonsense(message: Message) -> Message:
    return replace(message, tensors=((REQUEST_TENSOR, torch.full((100,), 255, dtype=torch.uint8)),))


@pytest.mark.parametrize(
    ("damage", "words"),
    [(without_inputs, "'tokens'"), (without_request, "without saying which"), (with_nonsense, "no request")],
)
def test_a_message_that_makes_no_sense_is_answered(damage: Callable[[Message], Message], words: str) -> None:
    first, second = messages_of(transformer())[:2]
    broken, whole = Queue().ask(damage(first), second)
    assert words in broken.failure
    assert whole.failure == ""


def test_an_owner_who_declared_the_speed_is_believed() -> None:
    (answer,) = Queue(refusal="its owner declared its speed").ask(messages_of(transformer())[0])
    assert answer.failure == "its owner declared its speed"
    assert answer.kind


@pytest.mark.parametrize("pieces", [0, 1, 5, 9])
def test_abandoned_measurements_are_answered_and_leave_nothing_behind(pieces: int) -> None:
    queue = Queue()
    messages = messages_of(transformer())
    for message in messages:
        queue.queue.add(message, MEMORY)
    for _ in range(pieces):
        queue.queue.advance()
    queue.queue.abandon("it got a stage in the meantime")
    assert not queue.queue.busy
    assert len(queue.answers) == len(messages)
    assert queue.answers[-1].failure == "it got a stage in the meantime"
    assert stages_alive() == 0


def test_nothing_is_left_behind() -> None:
    Queue().ask(*messages_of(transformer()))
    assert stages_alive() == 0


def stages_alive() -> int:
    gc.collect()
    return sum(type(item) is Stage for item in gc.get_objects())
