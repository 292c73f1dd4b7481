"""Messages on a stream of frames: a state machine without sockets, clocks or threads.

Theory of operation. Each end of a bidirectional stream has one :class:`MessageStream`. The owner submits encoded messages,
asks for :meth:`~MessageStream.next_frame` whenever the transport can take one, and feeds every frame that arrives to
:meth:`~MessageStream.handle`, which returns what happened.

- A message is a header and chunks of at most ``CHUNK_BYTES``, smaller on slow links. The header carries a checksum of itself
  and one of all bytes.
- The receiver answers a whole message with an acknowledgement, a damaged one with a refusal, upon which the sender sends it
  again, ``MAX_ATTEMPTS`` times in all; then both ends report it: :class:`GaveUp` here, :class:`CorruptSender` there.
- A header that the owner does not accept is refused for good, before anything is allocated.
- Credit bounds what the receiver must hold: for each generation and each kind named in ``credit`` the sender may have that
  many messages unconsumed. :meth:`~MessageStream.grant` says that one was consumed. Both ends must agree on the numbers.
- After :meth:`~MessageStream.advance` messages of older generations are forgotten here, and acknowledged unread when they
  still arrive, so a sender that has not heard of the new generation yet is not blamed.
- A frame without content only shows that the other end is alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atoll.protocol.errors import CorruptMessage, WireError
from atoll.protocol.ids import Generation
from atoll.protocol.messages import CHUNK_BYTES, EncodedMessage, Kind, MessageKey, header_is_whole
from atoll.protocol.receiving import Accept, Assembler, Incoming, Refusal
from atoll.protocol.sending import MAX_ATTEMPTS, Outgoing, SendQueue, urgency
from atoll.protocol.v1 import frames_pb2

__all__ = [
    "CHUNK_BYTES",
    "DEFAULT_MAX_MESSAGE_BYTES",
    "MAX_ATTEMPTS",
    "Accept",
    "Acknowledged",
    "Arrived",
    "CorruptSender",
    "GaveUp",
    "Incoming",
    "MessageStream",
    "StreamEvent",
    "frames_of",
    "urgency",
]

DEFAULT_MAX_MESSAGE_BYTES = 16 * 2**30  # a last resort; owners accept far less, by what they expect


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A whole and undamaged message, already acknowledged. ``attempts`` counts the sendings it took."""

    message: EncodedMessage
    attempts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """The other end has message ``number``."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """Message ``number`` will not arrive: refused for good, or ``corrupt`` (damaged at every attempt)."""

    number: int
    key: MessageKey
    reason: str
    corrupt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptSender:
    """The other end has sent message ``number`` damaged at every attempt."""

    number: int
    reason: str


StreamEvent = Arrived | Acknowledged | GaveUp | CorruptSender


class MessageStream:
    """One end of a stream. Not thread-safe: call it from one thread, or one event loop."""

    def __init__(
        self,
        accept: Accept,
        *,
        credit: Mapping[Kind, int] | None = None,
        generation: Generation = Generation(0),  # noqa: B008 - an int
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._generation = generation
        self._sending = SendQueue(credit or {}, chunk_bytes)
        self._receiving = Assembler(accept, credit or {}, max_message_bytes)
        self._answers: deque[frames_pb2.Frame] = deque()
        self._failures: dict[int, int] = {}

    @property
    def generation(self) -> Generation:
        """The oldest generation that is not dropped."""
        return self._generation

    @property
    def chunk_bytes(self) -> int:
        """The most that one frame from here carries."""
        return self._sending.chunk_bytes

    @property
    def num_unacknowledged(self) -> int:
        """Messages submitted here that the other end has not acknowledged, whether sent or not."""
        return len(self._sending)

    @property
    def num_unfinished(self) -> int:
        """Messages from the other end of which only a part is here."""
        return len(self._receiving)

    def submit(self, message: EncodedMessage) -> int:
        """Queues a message and returns its number. Its bytes must not change before it is acknowledged."""
        return self._sending.submit(message)

    def next_frame(self) -> frames_pb2.Frame | None:
        """The next frame to send: answers first, then by urgency; None when nothing may be sent now."""
        found = self.next_frame_of()
        return None if found is None else found[0]

    @property
    def has_answers(self) -> bool:
        """Whether the next frame is an answer."""
        return bool(self._answers)

    def most_urgent(self) -> int | None:
        """How urgent the next frame is that is no answer; None when there is none that credit allows to send."""
        return self._sending.most_urgent()

    def next_frame_of(self) -> tuple[frames_pb2.Frame, EncodedMessage | None] | None:
        """Like :meth:`next_frame`, with the message that the frame is part of (None for an answer)."""
        if self._answers:
            return self._answers.popleft(), None
        return self._sending.next()

    def handle(self, frame: frames_pb2.Frame) -> list[StreamEvent]:
        """Takes one frame from the other end. Raises WireError for a frame that has no place in a running stream."""
        match frame.WhichOneof("content"):
            case "chunk" | "header":
                return self._receive(frame)
            case "acknowledged":
                known = self._sending.acknowledge(frame.message)
                return [] if known is None else [Acknowledged(number=frame.message)]
            case "refused":
                return self._refused(frame.message, frame.refused)
            case "credit":
                self._add_credit(frame.credit)
                return []
            case None:
                return []
            case other:
                raise WireError(f"a {other} frame in the middle of a stream")

    def grant(self, generation: Generation, kind: Kind, messages: int = 1) -> None:
        """The owner has consumed messages of this generation and kind; tells the other end that it may send more."""
        if generation < self._generation:
            return
        self._receiving.release(generation, kind, messages)
        credit = frames_pb2.Credit(generation=generation, kind=kind.value, messages=messages)  # type: ignore[arg-type]
        self._answers.append(frames_pb2.Frame(credit=credit))

    def advance(self, generation: Generation) -> list[int]:
        """Drops everything of older generations; the numbers of the messages submitted here that are dropped."""
        self._generation = max(self._generation, generation)
        for number in self._receiving.drop_before(generation):
            self._failures.pop(number, None)
            self._answers.append(_acknowledgement(number))
        return self._sending.drop_before(generation)

    def go_on_with(self, rest: Incoming) -> None:
        """The next message from the other end is one that broke off on another stream: its chunks begin where ``rest`` ends."""
        self._receiving.go_on_with(rest)

    def take_unfinished(self) -> list[Incoming]:
        """What is here of messages that broke off."""
        return self._receiving.take_unfinished()

    def _receive(self, frame: frames_pb2.Frame) -> list[StreamEvent]:
        number = frame.message
        try:
            if frame.HasField("header"):
                if not header_is_whole(frame.header, number):
                    raise CorruptMessage("the header fails its checksum")
                if frame.header.key.generation < self._generation:
                    return self._skip(number)
                message = self._receiving.begin(number, frame.header)
            else:
                message = self._receiving.add(number, frame.chunk)
        except CorruptMessage as error:
            self._receiving.drop(number)
            return self._damaged(number, str(error))
        except Refusal as error:
            self._failures.pop(number, None)
            self._answers.append(_refusal(number, str(error), final=True))
            return []
        if message is None:
            return []
        self._answers.append(_acknowledgement(number))
        return [Arrived(message=message, attempts=self._failures.pop(number, 0) + 1)]

    def _skip(self, number: int) -> list[StreamEvent]:
        self._receiving.drop(number)
        self._failures.pop(number, None)
        self._answers.append(_acknowledgement(number))
        return []

    def _damaged(self, number: int, reason: str) -> list[StreamEvent]:
        failures = self._failures.get(number, 0) + 1
        self._failures[number] = failures
        self._answers.append(_refusal(number, reason, final=False))
        if failures < MAX_ATTEMPTS:
            return []
        del self._failures[number]
        return [CorruptSender(number=number, reason=f"a message was damaged {failures} times in a row: {reason}")]

    def _refused(self, number: int, refused: frames_pb2.Refused) -> list[StreamEvent]:
        if not self._sending.knows(number) or (not refused.final and self._sending.send_again(number)):
            return []
        message = self._sending.acknowledge(number)
        assert message is not None
        happened = "refused" if refused.final else f"damaged at each of {MAX_ATTEMPTS} attempts"
        reason = f"{message.key} was {happened}: {refused.reason}"
        return [GaveUp(number=number, key=message.key, reason=reason, corrupt=not refused.final)]

    def _add_credit(self, credit: frames_pb2.Credit) -> None:
        try:
            kind = Kind(credit.kind)
        except ValueError:
            raise WireError(f"credit for the unknown message kind {credit.kind}") from None
        if credit.generation >= self._generation:
            self._sending.add_credit(Generation(credit.generation), kind, credit.messages)


def frames_of(
    message: EncodedMessage, number: int, chunk_bytes: int = CHUNK_BYTES, begin: int = 0
) -> Iterator[frames_pb2.Frame]:
    """A whole message as frames, for a stream on which nothing comes back; without the first ``begin`` of its bytes where the
    other end has these."""
    outgoing = Outgoing(number, message.sealed(), chunk_bytes)
    yield outgoing.next_frame()
    outgoing.skip(begin)
    while not outgoing.finished:
        yield outgoing.next_frame()


def _acknowledgement(number: int) -> frames_pb2.Frame:
    return frames_pb2.Frame(message=number, acknowledged=frames_pb2.Acknowledged())


def _refusal(number: int, reason: str, *, final: bool) -> frames_pb2.Frame:
    return frames_pb2.Frame(message=number, refused=frames_pb2.Refused(reason=reason, final=final))
