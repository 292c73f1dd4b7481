"""The codecs that a run with ``compression: auto`` would use over slow links, step by step, in a training in one process.

Nothing is chosen here: the coordinator's own policy is told what a run would tell it (what a stage computes, how fast codecs
are on this machine, the links' rate, and after each step what each peer's guard saw of its links), and what it answers is in
force from the next step on. Only the clock is worked out instead of waited for (``slow_links``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from atoll.compression.context import Direction
from atoll.compression.policy import Rung
from atoll.compression.registry import MessageCoder, codec
from atoll.compression.speed import measure_speed
from atoll.coordinator.codec_choices import CodecChange, CodecChoices
from atoll.coordinator.planning.network import LinkMeasurement, build_network
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.instructions import WriteCommit
from atoll.coordinator.survey.observed import Observed
from atoll.peer.links.loss_guard import LossGuard
from atoll.peer.links.usage import UsageTable
from atoll.protocol.codec_names import LADDER
from atoll.protocol.courtesy import Courtesy
from atoll.protocol.graph import Boundary, StageGraph, TensorSpec, ValueReference
from atoll.protocol.ids import Generation, NodeIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.job import Compression
from atoll.protocol.messages import EncodedMessage, Message
from atoll.protocol.v1 import session_pb2

CODED_ELEMENTS = 2**17
CODED_REPETITIONS = 3
"""As peers measure codecs when they join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """As many stages as ``shapes`` of what crosses between two, and one more; each computes ``seconds`` for a microbatch."""

    seconds: float
    microbatches: int
    shapes: Sequence[tuple[int, ...]]


@dataclass(slots=True)
class _Peer:
    name: PeerId
    guard: LossGuard = field(default_factory=LossGuard)
    usage: UsageTable = field(init=False)

    def __post_init__(self) -> None:
        self.usage = UsageTable(self.name, Courtesy())


class AutoLinks:
    """``sent`` and ``received`` each message, then ``committed`` the step. ``changes`` are those of the policy so far."""

    def __init__(self, stages: Stages, bits_per_second: float, *, floor: str | None = None) -> None:
        self._stages = stages
        self._rate = bits_per_second / 8.0
        self._peers = [_Peer(PeerId(f"peer-{number + 1}")) for number in range(len(stages.shapes) + 1)]
        self._observed = Observed()
        self._choices = CodecChoices(Compression(floor=floor), self._observed)
        plan = self._plan()
        self._observed.planned(plan, {})
        names = [peer.name for peer in self._peers]
        rungs = tuple(_measured(name) for name in LADDER[1:])
        offers = [PeerOffer(name=name, flops_per_second=1e9, memory_bytes=2**33, codecs=rungs) for name in names]
        ways = [ends for one, other in pairwise(names) for ends in ((one, other), (other, one))]
        links = [
            LinkMeasurement(source=one, target=other, bytes_per_second=self._rate, latency_seconds=0.0) for one, other in ways
        ]
        self.changes: list[CodecChange] = list(
            self._choices.planned(
                plan,
                self._graphs(),
                offers,
                build_network(names, links),
                num_microbatches=stages.microbatches,
                next_step=StepNumber(1),
            )
        )
        self.seconds = 0.0
        """Of a processor, for what guards do."""

    def codec(self, source: StageIndex, target: StageIndex) -> str:
        """In use now from one stage to the next, or back."""
        return self._choices.codec(self._peers[source].name, self._peers[target].name)

    def sent(self, message: Message, coder: MessageCoder, encoded: EncodedMessage, name: str) -> None:
        """A message was encoded at its source."""
        peer, target = self._peers[message.key.source], self._peers[message.key.target].name
        usage = peer.usage.of(target, message.key.kind)
        usage.encoded(name, message)
        usage.num_bytes += encoded.num_bytes
        started = time.thread_time()
        peer.guard.sent(target, coder, message, encoded, usage)
        self.seconds += time.thread_time() - started

    def received(self, message: Message) -> None:
        """A message was decoded at its target."""
        peer, source = self._peers[message.key.target], self._peers[message.key.source].name
        started = time.thread_time()
        peer.guard.received(source, message, peer.usage)
        self.seconds += time.thread_time() - started

    def committed(self, step: int, *, loss: float, num_tokens: int, stage_seconds: float, step_seconds: float) -> None:
        """A step is done, which computed ``stage_seconds`` in each stage; what changes from the next one on is decided."""
        for peer in self._peers:
            uses = peer.usage.report()
            for use in uses:
                use.bytes_per_second = self._rate
            self._observed.reported(peer.name, session_pb2.StageReport(compute_seconds=stage_seconds))
            self._observed.carried(peer.name, uses)
            self._choices.carried(uses)
        self._choices.committed(
            WriteCommit(
                generation=Generation(1),
                step=StepNumber(step),
                loss=loss,
                grad_norm=1.0,
                clip_factor=1.0,
                learning_rate=0.0,
                seconds=step_seconds,
                num_tokens=num_tokens,
                samples="",
                sample_ids=(),
            )
        )
        self.changes += self._choices.changes(StepNumber(step + 1))

    def _plan(self) -> Plan:
        seconds, count = self._stages.seconds, self._stages.microbatches
        stages = tuple(
            StagePlan(
                stage=StageIndex(number),
                replicas=(peer.name,),
                first=NodeIndex(number),
                end=NodeIndex(number + 1),
                in_flight=count,
                recompute=False,
                memory_bytes=1,
                microbatch_seconds=seconds,
                sent_bytes=0,
                step_compute_seconds=count * seconds,
            )
            for number, peer in enumerate(self._peers)
        )
        return Plan(stages=stages, spares=(), step_seconds=count * seconds)

    def _graphs(self) -> list[StageGraph]:
        """Of each stage, only what it sends and receives."""
        crossings = [
            Boundary(
                value=ValueReference(NodeIndex(number), 0),
                spec=TensorSpec(shape, torch.float32),
                source=StageIndex(number),
                target=StageIndex(number + 1),
                differentiable=True,
            )
            for number, shape in enumerate(self._stages.shapes)
        ]
        return [
            StageGraph(
                stage=StageIndex(number),
                num_stages=len(self._peers),
                nodes=(),
                parameters=(),
                buffers=(),
                inputs=(),
                receives=tuple(crossing for crossing in crossings if crossing.target == number),
                sends=tuple(crossing for crossing in crossings if crossing.source == number),
            )
            for number in range(len(self._peers))
        ]


def _measured(name: str) -> Rung:
    speed = measure_speed(codec(name), time.thread_time, num_elements=CODED_ELEMENTS, repetitions=CODED_REPETITIONS)
    return Rung(
        name=name,
        ratio=speed.ratio,
        encode_bytes_per_second=speed.encode_bytes_per_second,
        decode_bytes_per_second=speed.decode_bytes_per_second,
    )


def told(changes: Sequence[CodecChange]) -> list[str]:
    """The changes as lines for people, those of one step and codec together."""
    found: dict[tuple[int, str, str], list[str]] = {}
    for change in changes:
        way = Direction.FORWARD if change.source < change.target else Direction.BACKWARD
        found.setdefault((change.step, str(way), change.codec), []).append(
            f"{change.source} -> {change.target}: {change.reason}"
        )
    return [f"step {step}, {way}: {name} ({'; '.join(why)})" for (step, way, name), why in found.items()]
