"""The codecs of a plan's links from its first step on, by what peers report."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.coordinator.codec_choices import MOST_DAMAGE, CodecChoices
from atoll.coordinator.planning.codecs import adaptive_codecs
from atoll.coordinator.planning.network import LinkMeasurement, PeerLine, build_network
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.instructions import WriteCommit
from atoll.coordinator.survey.observed import Observed
from atoll.protocol.graph import Boundary, StageGraph, TensorSpec, ValueReference
from atoll.protocol.ids import Generation, NodeIndex, PeerId, StageIndex, StepNumber
from atoll.protocol.job import Compression
from atoll.protocol.v1 import session_pb2

A, B = PeerId("a"), PeerId("b")
MICROBATCHES, TOKENS = 8, 1000
COMPUTE, BYTES = 0.1, 1_000_000


def graphs() -> list[StageGraph]:
    crossing = Boundary(
        value=ValueReference(NodeIndex(0), 0),
        spec=TensorSpec((BYTES // 4,), torch.float32),
        source=StageIndex(0),
        target=StageIndex(1),
        differentiable=True,
    )
    return [
        StageGraph(
            stage=StageIndex(stage),
            num_stages=2,
            nodes=(),
            parameters=(),
            buffers=(),
            inputs=(),
            receives=(crossing,) * stage,
            sends=(crossing,) * (1 - stage),
        )
        for stage in range(2)
    ]


def plan() -> Plan:
    stages = tuple(
        StagePlan(
            stage=StageIndex(index),
            replicas=(peer,),
            first=NodeIndex(index),
            end=NodeIndex(index + 1),
            in_flight=1,
            recompute=False,
            memory_bytes=1,
            microbatch_seconds=COMPUTE,
            sent_bytes=BYTES,
            step_compute_seconds=MICROBATCHES * COMPUTE,
        )
        for index, peer in enumerate((A, B))
    )
    return Plan(stages=stages, spares=(), step_seconds=1.0)


class Run:
    """A run of two peers with a link of this rate."""

    def __init__(
        self, rate: float, *, machine: str = "", latency: float = 0.0001, cap: float | None = None, **compression: Any
    ) -> None:
        self.observed = Observed()
        self.choices = CodecChoices(Compression(**compression), self.observed)
        self.step = 0
        lines = {peer: PeerLine(max_upload_bytes_per_second=cap) for peer in (A, B)}
        links = [
            LinkMeasurement(source=one, target=other, bytes_per_second=rate, latency_seconds=latency)
            for one, other in ((A, B), (B, A))
        ]
        offers = [PeerOffer(name=peer, flops_per_second=1e9, memory_bytes=10**9, machine=machine) for peer in (A, B)]
        self.observed.planned(plan(), {})
        self.first = self.choices.planned(
            plan(),
            graphs(),
            offers,
            build_network(lines, links, lines),
            num_microbatches=MICROBATCHES,
            next_step=StepNumber(1),
        )

    def does(self, seconds: float, rate: float, **guard: Any) -> dict[tuple[PeerId, PeerId], str]:
        """One more step that takes so long, over links that show this rate; what changes then."""
        self.step += 1
        for source, target, direction in ((A, B, "forward"), (B, A, "backward")):
            use = session_pb2.LinkUse(
                source=source,
                target=target,
                direction=direction,
                codec=self.choices.codec(source, target),
                bytes_per_second=rate,
                messages=MICROBATCHES * self.step,
                raw_bytes=MICROBATCHES * self.step * BYTES,
                **(guard if direction == guard.pop("of", direction) else {}),
            )
            self.observed.reported(source, session_pb2.StageReport(compute_seconds=MICROBATCHES * COMPUTE))
            self.observed.carried(source, [use])
            self.choices.carried([use])
        self.choices.committed(
            WriteCommit(
                generation=Generation(1),
                step=StepNumber(self.step),
                loss=2.0,
                grad_norm=1.0,
                clip_factor=1.0,
                learning_rate=0.1,
                seconds=seconds,
                num_tokens=TOKENS,
                samples="",
                sample_ids=(),
            )
        )
        changes = self.choices.changes(StepNumber(self.step + 1))
        return {(change.source, change.target): change.codec for change in changes}


def test_a_quick_link_is_raw_and_a_slow_one_is_not() -> None:
    assert [(change.source, change.target, change.codec) for change in Run(1e9).first] == [(A, B, "raw"), (B, A, "raw")]
    assert all(change.codec != "raw" and change.step == 1 for change in Run(1e6).first)
    assert [change.codec for change in Run(1e6, forward="int8", backward="int3").first] == ["int8", "int3"]
    assert {change.codec for change in Run(1e5, floor="bf16").first} == {"bf16"}


@pytest.mark.parametrize(
    ("settings", "is_raw"),
    [
        ({"machine": "m"}, True),
        ({"machine": "m", "cap": 1e6}, False),  # its owner allows no more
        ({"machine": "m", "latency": 0.02}, False),  # the network is shaped
    ],
)
def test_within_a_machine_nothing_is_lost_for_being_busy(settings: dict[str, Any], is_raw: bool) -> None:
    assert all((change.codec == "raw") is is_raw for change in Run(1e6, **settings).first)


def test_a_link_that_becomes_slow_changes_as_soon_as_that_is_measured() -> None:
    run = Run(1e9)
    assert run.does(9.0, 1e9) == {}  # the first step tells nothing
    assert run.does(4.0, 3e6) == {}
    changed = run.does(4.0, 3e6)
    assert changed.keys() == {(A, B), (B, A)}
    assert run.choices.of(A) == {B: changed[A, B]}
    assert run.choices.of(A, raw=True) == {B: "raw"}


def test_a_slow_step_without_waiting_changes_nothing() -> None:
    run = Run(1e9)
    assert [run.does(MICROBATCHES * COMPUTE + COMPUTE, 3e6) for _ in range(6)] == [{}] * 6


def test_a_step_that_is_run_again_is_run_as_it_was() -> None:
    run = Run(1e9)
    for _ in range(3):
        run.does(4.0, 3e6)
    before = dict(run.choices.of(A))
    assert run.choices.changes(StepNumber(run.step + 1)) == ()
    assert run.choices.of(A) == before


def use_of(**guard: Any) -> session_pb2.LinkUse:
    return session_pb2.LinkUse(source=A, target=B, direction="forward", codec="int8", **{"guarded": 9, **guard})


def test_damage_is_the_slope_as_far_as_it_shows_and_no_more_than_the_curvature_allows() -> None:
    run = Run(1e6)
    assert run.choices.damage(use_of(curvature=1e-9)) is None  # no loss is known yet
    run.does(1.0, 1e6)
    assert run.choices.damage(use_of(curvature=1e-8, guarded=2)) is None
    small = run.choices.damage(use_of(curvature=1e-9, slope=1e-9))
    assert small == pytest.approx(0.5 * TOKENS * MICROBATCHES * 1e-9 / 2.0)
    large = run.choices.damage(use_of(curvature=1e-3, slope=-0.01))
    assert large == pytest.approx(MICROBATCHES * (0.01 + 2.0 * (1e-3 / 9) ** 0.5) / 2.0)
    assert run.choices.damage(use_of(curvature=float("nan"))) is None


def test_what_costs_the_loss_too_much_is_left_for_a_less_lossy_codec() -> None:
    run = Run(1e6)
    before = run.choices.codec(A, B)
    curvature = 3.0 * MOST_DAMAGE * 2.0 / (0.5 * TOKENS * MICROBATCHES)
    changed = run.does(1.0, 1e6, guarded=9, slope=-1.0, curvature=curvature, of="forward")
    assert changed.keys() == {(A, B)}
    assert changed[A, B] != before


@pytest.mark.parametrize("seen", [{"relative_error": 0.6}, {"bias": 0.3}])
def test_gradients_that_are_far_off_or_too_short_are_not_accepted(seen: dict[str, float]) -> None:
    run = Run(1e6)
    assert run.does(1.0, 1e6, guarded=9, of="backward", **seen).keys() == {(B, A)}


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_adatopk_gives_a_link_its_codec_by_how_slow_it_is(way: str) -> None:
    """The only link is the slowest one. The other direction is as the job says."""
    other = "backward" if way == "forward" else "forward"
    run = Run(1e5, **dict[str, Any]({way: "adatopk", other: "int8"}))
    of = {"forward": (A, B), "backward": (B, A)}
    assert (run.choices.codec(*of[way]), run.choices.codec(*of[other])) == ("sparse-300", "int8")


def test_adatopk_leaves_fast_links_dense() -> None:
    seconds = {(A, B): 3.0, (B, A): 1.0, (B, PeerId("c")): 0.005, (PeerId("c"), B): 0.3}
    assert list(adaptive_codecs(seconds).values()) == ["sparse-300", "sparse-300", "sparse-30", "sparse-30"]
    assert adaptive_codecs({(A, B): 900.0, (B, PeerId("c")): 2.9})[B, PeerId("c")] == "raw"
