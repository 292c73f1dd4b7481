"""What was found out about peers and links, as the planner gets it."""

from __future__ import annotations

import pytest

from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.plan import Plan, StagePlan
from atoll.coordinator.planning.segments import PeerOffer, Segments, StageMemory
from atoll.coordinator.survey.findings import Findings
from atoll.coordinator.survey.observed import Observed
from atoll.coordinator.survey.probe_results import THE_COORDINATOR, ProbeResult
from atoll.coordinator.survey.probe_schedule import ProbePair, ProbeParty
from atoll.coordinator.survey.segment_measuring import SegmentMeasuring
from atoll.coordinator.survey.survey_plan import GivenUp
from atoll.coordinator.tracing.kinds import SegmentKind, SegmentKinds
from atoll.protocol.graph import StageGraph
from atoll.protocol.ids import NodeIndex, PeerId, StageIndex
from atoll.protocol.v1 import session_pb2

A, B, C = (PeerId(name) for name in "abc")


@pytest.fixture
def measuring() -> SegmentMeasuring:
    """A model of two blocks and a head."""
    graph = StageGraph(stage=StageIndex(0), num_stages=1, nodes=(), parameters=(), buffers=(), inputs=(), receives=(), sends=())
    kinds = tuple(SegmentKind(fingerprint=name, graph=graph) for name in ("block", "head"))
    return SegmentMeasuring(kinds=SegmentKinds(kinds=kinds, of_segment=(0, 0, 1)), limit_seconds=1.0, encoded=())


SEGMENTS = Segments(
    positions=tuple(map(NodeIndex, range(4))),
    forward_flops=(0.0, 10.0, 20.0, 30.0),
    backward_flops=(0.0, 20.0, 40.0, 60.0),
    parameter_bytes=(0.0, 1.0, 2.0, 3.0),
    forward_bytes=(0.0, 1.0, 1.0, 0.0),
    backward_bytes=(0.0, 1.0, 1.0, 0.0),
    memory=lambda first, end, recompute: StageMemory(fixed_bytes=1, microbatch_bytes=1),
)


def offer(name: PeerId, machine: str = "") -> PeerOffer:
    return PeerOffer(name=name, flops_per_second=90.0, memory_bytes=100, machine=machine)


def measure(findings: Findings, peer: PeerId, seconds: float) -> None:
    for kind in ("block", "head"):
        answer = session_pb2.Measured(
            kind=kind, forward_seconds=seconds, backward_seconds=seconds, accumulate_seconds=seconds, update_seconds=seconds
        )
        findings.measured(peer, answer)


def run(findings: Findings, observed: Observed, peer: PeerId, predicted: float, took: float) -> None:
    """The peer's stage does some steps, under a plan that counts on what was found out."""
    stage = StagePlan(
        stage=StageIndex(0),
        replicas=(peer,),
        first=NodeIndex(0),
        end=NodeIndex(3),
        in_flight=1,
        recompute=False,
        memory_bytes=1,
        microbatch_seconds=predicted,
        sent_bytes=0,
        step_compute_seconds=predicted,
    )
    observed.planned(Plan(stages=(stage,), spares=(), step_seconds=predicted), {one: findings.factor(one) for one in (A, B, C)})
    for _ in range(3):
        observed.reported(peer, session_pb2.StageReport(compute_seconds=took))


def test_kinds_become_positions_and_steps_correct_them(measuring: SegmentMeasuring) -> None:
    observed = Observed()
    findings = Findings(observed)
    measure(findings, A, 0.5)
    (before,) = findings.offers([offer(A)], measuring, SEGMENTS)
    assert before.measured is not None
    assert before.measured.forward == (0.0, 0.5, 1.0, 1.5)
    assert findings.how_measured(A) == "measured"
    run(findings, observed, A, predicted=1.0, took=2.0)
    (after,) = findings.offers([offer(A)], measuring, SEGMENTS)
    assert after.measured is not None
    assert after.measured.update == pytest.approx((0.0, 1.0, 2.0, 3.0))
    assert [answer.forward_seconds for answer in findings.kinds(A)] == pytest.approx([1.0, 1.0])


def test_a_peer_that_was_not_measured_falls_short_of_its_promise_as_the_others_do(measuring: SegmentMeasuring) -> None:
    findings = Findings(Observed())
    measure(findings, A, 1.0)  # 9 s, and 1 s was promised
    findings.give_up([GivenUp(peer=B, pair=None, reason="it did not answer")])
    findings.measured(C, session_pb2.Measured(kind="block", failure="its owner said so", declared=True))
    _, silent, declared = findings.offers([offer(A), offer(B), offer(C)], measuring, SEGMENTS)
    assert silent.measured is None
    assert silent.flops_per_second == pytest.approx(10.0)
    assert findings.how_measured(B) == "estimated: it did not answer"
    assert declared.flops_per_second == 90.0


def test_what_slows_a_machine_slows_all_its_peers(measuring: SegmentMeasuring) -> None:
    observed = Observed()
    findings = Findings(observed)
    for peer in (A, B, C):
        measure(findings, peer, 0.5)
    offers = [offer(A, "one"), offer(B, "one"), offer(C, "two")]
    findings.offers(offers, measuring, SEGMENTS)
    run(findings, observed, A, predicted=1.0, took=3.0)

    def counted_on() -> list[float]:
        return [found.measured.forward[-1] for found in findings.offers(offers, measuring, SEGMENTS) if found.measured]

    assert counted_on() == pytest.approx([4.5, 4.5, 1.5])
    run(findings, observed, B, predicted=3.0, took=3.0)
    assert counted_on() == pytest.approx([4.5, 4.5, 1.5]), "what was counted on came true"


def test_news_is_told_once_with_what_is_counted_on_instead(measuring: SegmentMeasuring) -> None:
    findings = Findings(Observed())
    parties = [ProbeParty(name=name) for name in (A, B)]
    measure(findings, A, 0.5)
    findings.give_up([GivenUp(peer=B, pair=None, reason="it did not answer")])
    findings.give_up([GivenUp(peer=A, pair=ProbePair(source=A, target=B), reason="no way")])
    result = ProbeResult(
        pair=ProbePair(source=A, target=None),
        round_trip_seconds=0.02,
        upload_bytes_per_second=1e6,
        download_bytes_per_second=2e6,
    )
    findings.probed(result)
    network = findings.network(parties, [A, B])
    told = findings.news([A, B], network, measuring)
    assert [(event.what, event.peer, event.target, event.estimated) for event in told] == [
        ("segments", A, "", False),
        ("segments", B, "", True),
        ("link", A, THE_COORDINATOR, False),
        ("link", THE_COORDINATOR, A, False),
        ("link", A, B, True),
        ("link", B, A, True),
    ]
    assert told[0].forward_seconds == 1.5
    assert [event.reason for event in told if event.estimated] == ["it did not answer", "no way", "no way"]
    assert told[4].bytes_per_second == rate(network, A, B)
    assert findings.is_estimated(A, B)
    assert findings.news([A, B], network, measuring) == ()
    findings.forget(B)
    assert [event.peer for event in findings.news([A, B], network, measuring)] == [B]


def rate(network: Network, one: PeerId, other: PeerId) -> float:
    return float(network.rate[network.names.index(one), network.names.index(other)])


def test_traffic_takes_the_place_of_a_probe(measuring: SegmentMeasuring) -> None:
    observed = Observed()
    findings = Findings(observed)
    parties = [ProbeParty(name=name) for name in (A, B)]
    pair = ProbePair(source=A, target=B)
    probed = ProbeResult(pair=pair, round_trip_seconds=0.02, upload_bytes_per_second=4e6, download_bytes_per_second=4e6)
    findings.probed(probed)
    observed.carried(A, [session_pb2.LinkUse(source=A, target=B, bytes_per_second=1e6)])
    network = findings.network(parties, [A, B])
    assert (rate(network, A, B), rate(network, B, A)) == (1e6, 4e6)
    assert not findings.is_estimated(A, B)
    assert findings.round_trip_seconds(B, A) == 0.02


def test_peers_of_one_machine_are_equally_far_from_the_coordinator(measuring: SegmentMeasuring) -> None:
    findings = Findings(Observed())
    for peer, seconds in ((A, 0.02), (C, 0.5)):
        findings.probed(ProbeResult(pair=ProbePair(source=peer, target=None), round_trip_seconds=seconds))
    offers = [offer(A, "one"), offer(B, "one"), offer(C, "two"), offer(PeerId("d"))]
    found = findings.offers(offers, measuring, SEGMENTS)
    assert [one.coordinator_round_trip_seconds for one in found] == [0.02, 0.02, 0.5, pytest.approx(0.26)]
    (alone,) = Findings(Observed()).offers([offer(A, "one")], measuring, SEGMENTS)
    assert alone.coordinator_round_trip_seconds == 0.0
