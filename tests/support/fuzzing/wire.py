"""Frames, message headers and what they carry, control messages, probes."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

import torch

from atoll.compression.registry import MessageCoder
from atoll.coordinator.measurements import Measurements
from atoll.coordinator.sessions.membership import Member, Membership
from atoll.coordinator.sessions.translation import held, introduction, run_event
from atoll.coordinator.survey.probe_results import probe_result
from atoll.coordinator.survey.probe_schedule import ProbePair
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.session.session import Session
from atoll.peer.stage.boundaries import Boundaries
from atoll.peer.stage.step import bindings_of
from atoll.protocol.channel import PROTOCOL_VERSION
from atoll.protocol.errors import WireError
from atoll.protocol.framing import Arrived, MessageStream, frames_of
from atoll.protocol.ids import Generation, MicrobatchIndex, NodeIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.job import Compression
from atoll.protocol.messages import EncodedMessage, EncodedTensor, Kind, Message, MessageHeader, MessageKey
from atoll.protocol.probe_exchange import receive_load
from atoll.protocol.receiving import Incoming
from atoll.protocol.samples import samples_of
from atoll.protocol.state import state_judge
from atoll.protocol.v1 import frames_pb2, session_pb2
from atoll.protocol.v1.probe_pb2 import ProbeEnd, ProbeFrame, ProbeStart
from support.fuzzing.target import RAW_BYTES, Choices, Target, framed
from support.hand_models import transformer
from support.messages import encoded_of, key_of

_CREDIT = {Kind.ACTIVATION: 2, Kind.GRADIENT: 2}
_WHOLE, _CONTINUED = 1, 2


def wire_targets() -> list[Target]:
    """Everything that a peer or the coordinator is sent."""
    messages = _Messages()

    return [
        Target(name="frames", decode=_frames, seeds=_frame_seeds, thousands=900),
        Target(name="messages", decode=messages.decode, seeds=messages.seeds, thousands=500),
        Target(name="to-coordinator", decode=_to_coordinator, seeds=_peer_seeds, thousands=1500),
        Target(name="to-peer", decode=_to_peer, seeds=_coordinator_seeds, thousands=1500),
        Target(name="probes", decode=_probe, seeds=_probe_seeds, thousands=600),
    ]


def _frames(data: bytes) -> None:
    """Frames of one stream. A fuzzer cannot guess checksums, so headers get right ones where a bit says so."""
    choices = Choices(data)
    flags = choices.below(4)
    stream = MessageStream(lambda header: None, credit=_CREDIT, max_message_bytes=RAW_BYTES, generation=Generation(1))
    stream.submit(encoded_of(key_of(), 100))
    if flags & _CONTINUED:
        stream.go_on_with(_broken_off())
    for piece in choices.pieces():
        frame = frames_pb2.Frame.FromString(piece)
        if flags & _WHOLE and frame.HasField("header"):
            frame.header.header_checksum = _right_checksum(frame)
        for event in stream.handle(frame):
            if isinstance(event, Arrived):
                stream.grant(event.message.key.generation, event.message.key.kind)
        while stream.next_frame() is not None:
            pass
    stream.take_unfinished()


def _right_checksum(frame: frames_pb2.Frame) -> int:
    from atoll.protocol.messages import _header_checksum

    return _header_checksum(frame.header, frame.message)


def _broken_off() -> Incoming:
    message = encoded_of(key_of(), 2000)
    incoming = Incoming(message.header(chunk_bytes=1024))
    incoming.allocate()
    incoming.add(bytes(message.tensors[0].data)[:1024])
    return incoming


def _frame_seeds() -> Sequence[bytes]:
    message = encoded_of(key_of(), 40, 1500)
    frames = [frame.SerializeToString() for frame in frames_of(message, 1, 1024)]
    rest = [frame.SerializeToString() for frame in frames_of(encoded_of(key_of(), 2000), 1, 1024, 1024)]
    answers = [
        frames_pb2.Frame(message=1, acknowledged=frames_pb2.Acknowledged()),
        frames_pb2.Frame(message=1, refused=frames_pb2.Refused(reason="no", final=False)),
        frames_pb2.Frame(credit=frames_pb2.Credit(generation=1, kind=frames_pb2.KIND_ACTIVATION, messages=1)),
        frames_pb2.Frame(ping=3),
        frames_pb2.Frame(),
    ]
    told = [frame.SerializeToString() for frame in answers]
    return [b"\x00" + framed(frames), b"\x01" + framed([*frames, *told]), b"\x02" + framed(rest), b"\x01" + framed(told)]


class _Messages:
    """A header and the bytes that follow it, as they come out of a stream, up to the operators' door."""

    def __init__(self) -> None:
        graphs = slice_graph(transformer(tied=True).graph, (NodeIndex(9),))
        self._boundaries = [Boundaries(graph) for graph in graphs]
        self._judges = [state_judge(graph, "adamw") for graph in graphs]

    def decode(self, data: bytes) -> None:
        choices = Choices(data)
        coder = MessageCoder(run_seed=3)
        for piece in choices.pieces():
            proto = frames_pb2.MessageHeader.FromString(piece)
            proto.chunk_bytes = proto.chunk_bytes or 1024
            header = MessageHeader.from_proto(proto)
            if header.raw_bytes > RAW_BYTES or header.num_bytes > RAW_BYTES:
                raise WireError("a stream refuses it")
            parts = [choices.take(tensor.num_bytes).ljust(tensor.num_bytes, b"\x55") for tensor in header.tensors]
            tensors = tuple(
                EncodedTensor(name=one.name, dtype=one.dtype, shape=one.shape, codec=one.codec, data=part, order=one.order)
                for one, part in zip(header.tensors, parts, strict=True)
            )
            self._received(header, coder.decode(EncodedMessage(key=header.key, tensors=tensors, numbers=header.numbers)))

    def _received(self, header: MessageHeader, message: Message) -> None:
        samples_of(message.numbers)
        bindings = bindings_of(message.numbers)
        for boundaries, judge in zip(self._boundaries, self._judges, strict=True):
            judge(header)
            names = [name for name, _ in message.tensors]
            key = message.key
            with contextlib.suppress(WireError):
                if key.kind is Kind.BATCH:
                    boundaries.read_batch(message.tensors, bindings)
                elif boundaries.refusal(key, names) is not None:
                    continue
                elif key.kind is Kind.ACTIVATION:
                    boundaries.read_activation(key.source, message.tensors, bindings)
                elif key.kind is Kind.GRADIENT:
                    boundaries.read_gradient(key.source, message.tensors, bindings)
                elif key.kind is Kind.TIED_GRADIENT:
                    boundaries.read_tied(message.tensors)

    def seeds(self) -> Sequence[bytes]:
        found = []
        for number, codec in enumerate(("raw", "int8", "int4", "transform", "topk-10", "delta-4", "bf16", "packed")):
            kind = (Kind.ACTIVATION, Kind.GRADIENT, Kind.BATCH, Kind.TIED_GRADIENT)[number % 4]
            key = MessageKey(
                generation=Generation(1),
                step=StepNumber(2),
                microbatch=MicrobatchIndex(0),
                kind=kind,
                source=StageIndex(0),
                target=StageIndex(1),
            )
            tensor = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(number))
            numbers = {"size:b": 4.0, "scale": 0.5, **{f"sample:{place}": float(place) for place in range(4)}}
            message = MessageCoder(3).encode(Message(key=key, tensors=(("9:0", tensor),), numbers=numbers), codec)
            header = message.header(chunk_bytes=1024).to_proto(1).SerializeToString()
            found.append(framed([header]) + b"".join(bytes(one.data) for one in message.tensors))
        return found


def _to_coordinator(data: bytes) -> None:
    """What an admitted peer tells the coordinator."""
    peer = PeerId("ann")
    measurements = Measurements(Compression())
    for piece in Choices(data).pieces():
        message = session_pb2.PeerMessage.FromString(piece)
        match message.WhichOneof("content"):
            case "join":
                held(message.join, "run")
                said = introduction(message.join)
                member = Membership(0.0).admit(said, "ipv4:10.0.0.1:5", "0", 0.0)
                assert not isinstance(member, Member) or member.name
            case "probed":
                probe_result(ProbePair(source=peer, target=PeerId("bob")), message.probed)
            case "ready" | "report":
                run_event(peer, message)
                measurements.reported(peer, message)
            case _:
                run_event(peer, message)


def _peer_seeds() -> Sequence[bytes]:
    join = session_pb2.Join(
        protocol_version=PROTOCOL_VERSION,
        name="ann",
        address="10.0.0.1:7001",
        device="cpu",
        threads=2,
        memory_bytes=2**30,
        flops_per_second=1e9,
        codecs=[session_pb2.CodecSpeed(codec="int8", encode_bytes_per_second=1e9, decode_bytes_per_second=1e9, ratio=0.26)],
        held=session_pb2.HeldState(run_id="run", step=3, generation=2, names=["w"]),
        snapshots=[session_pb2.HeldSnapshot(run_id="run", step=2, names=["w"], num_bytes=8)],
    )
    use = session_pb2.LinkUse(source="ann", target="bob", direction="forward", codec="int8", bytes=9, seconds_busy=0.5)
    report = session_pb2.StageReport(
        generation=1,
        step=1,
        losses=[session_pb2.MicrobatchLoss(microbatch=0, loss=1.5, metrics={"accuracy": 0.5})],
        squared_norms=[session_pb2.SquaredNorm(parameter="w", value=2.0)],
        compute_seconds=0.1,
        links=[use],
        spans=[session_pb2.Span(what="forward", microbatch=0, begin_seconds=0.1, seconds=0.2)],
    )
    fault = session_pb2.Fault(generation=1, step=1, kind=session_pb2.Fault.FAULT_CORRUPT, reason="it is", accused="bob")
    messages = [
        session_pb2.PeerMessage(join=join),
        session_pb2.PeerMessage(ready=session_pb2.Ready(generation=1, resident_bytes=5)),
        session_pb2.PeerMessage(report=report),
        session_pb2.PeerMessage(fault=fault),
        session_pb2.PeerMessage(progress=session_pb2.Progress(generation=1, step=1, phase="idle", waiting_for="bob")),
        session_pb2.PeerMessage(leave=session_pb2.Leave(reason="tired", hand_over_seconds=3.0)),
        session_pb2.PeerMessage(snapshot_taken=session_pb2.SnapshotTaken(step=1, num_bytes=8, names=["w"])),
        session_pb2.PeerMessage(probed=session_pb2.Probed(number=1, round_trip_seconds=0.1, upload_bytes_per_second=1e6)),
    ]
    pieces = [message.SerializeToString() for message in messages]
    return [framed(pieces), *(framed([piece]) for piece in pieces)]


def _to_peer(data: bytes) -> None:
    """What a coordinator tells a peer."""
    session = Session()
    for piece in Choices(data).pieces():
        session.handle(session_pb2.CoordinatorMessage.FromString(piece))


def _coordinator_seeds() -> Sequence[bytes]:
    messages = [
        session_pb2.CoordinatorMessage(welcome=session_pb2.Welcome(run="gpt", name="ann", run_id="run")),
        session_pb2.CoordinatorMessage(start=session_pb2.StartStep(generation=1, step=1, num_microbatches=2)),
        session_pb2.CoordinatorMessage(commit=session_pb2.Commit(generation=1, step=1, clip_factor=1.0, learning_rate=0.1)),
        session_pb2.CoordinatorMessage(void=session_pb2.Void(generation=1, step=1, next_generation=2, reason="why")),
        session_pb2.CoordinatorMessage(lend=session_pb2.Lend(generation=3, committed_step=1, borrowers=["bob"])),
        session_pb2.CoordinatorMessage(release=session_pb2.Release(generation=3)),
        session_pb2.CoordinatorMessage(keep_snapshots=session_pb2.KeepSnapshots(steps=[1, 2])),
        session_pb2.CoordinatorMessage(store=session_pb2.Store(generation=3, step=1)),
        session_pb2.CoordinatorMessage(rejected=session_pb2.Rejected(reason="no", again=True)),
    ]
    pieces = [message.SerializeToString() for message in messages]
    return [framed(pieces), *(framed([pieces[0], piece]) for piece in pieces[1:])]


class _Duplex:
    """A stream whose other end has said all it will say."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = list(pieces)

    async def read(self) -> object:
        return ProbeFrame.FromString(self._pieces.pop(0)) if self._pieces else None

    async def write(self, message: ProbeFrame, /) -> None:
        """Nobody reads it."""


def _at_once(coroutine: Coroutine[Any, Any, object]) -> None:
    """Runs what waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise AssertionError("it waits")


def _probe(data: bytes) -> None:
    pieces = list(Choices(data).pieces())
    start = ProbeStart.FromString(pieces[0] if pieces else b"")
    start.seconds = min(max(0.0, start.seconds), 3.0)
    start.round_trip_seconds = min(max(0.0, start.round_trip_seconds), 10.0)
    _at_once(receive_load(_Duplex(pieces[1:]), start))


def _probe_seeds() -> Sequence[bytes]:
    start = ProbeStart(seconds=1.0, round_trip_seconds=0.01).SerializeToString()
    load, end = ProbeFrame(load=b"x" * 200).SerializeToString(), ProbeFrame(end=ProbeEnd()).SerializeToString()
    return [framed([start, load, load, end]), framed([start, end])]
