"""What is measured before a plan is made, and when: never two things on one machine, and an end for whoever is silent."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.survey.probe_schedule import LATENCIES_AT_ONCE, ProbePair, ProbeParty
from atoll.coordinator.survey.survey_plan import GivenUp, MeasureKinds, ProbeLink, Request, Survey, SurveyLimits
from atoll.protocol.ids import PeerId

KINDS = ("embedding", "block")
LIMITS = SurveyLimits(kind_seconds=10.0, probe_seconds=2.0, answer_seconds=1.0)


def party(name: str, machine: str = "") -> ProbeParty:
    return ProbeParty(name=PeerId(name), machine=machine)


def pair(source: str, target: str | None, *, latency_only: bool = False) -> ProbePair:
    return ProbePair(source=PeerId(source), target=PeerId(target) if target else None, latency_only=latency_only)


def aimed(parties: Iterable[ProbeParty], pairs: Iterable[ProbePair]) -> Survey:
    survey = Survey(KINDS, LIMITS)
    survey.aim(parties, pairs)
    return survey


def answer(survey: Survey, request: Request, failure: str = "", now: float = 0.0) -> None:
    if isinstance(request, ProbeLink):
        assert survey.awaited(request.peer, request.number) == request
        survey.probed(request, failure)
        return
    for kind in request.kinds:
        assert survey.measured(request.peer, kind, now, failure)


def test_peers_of_one_machine_measure_one_after_the_other_and_machines_at_once() -> None:
    survey = aimed([party("a", "one"), party("b", "one"), party("c", "two")], [])
    assert survey.advance(0.0) == (MeasureKinds(peer=PeerId("a"), kinds=KINDS), MeasureKinds(peer=PeerId("c"), kinds=KINDS))
    assert survey.advance(1.0) == ()
    answer(survey, survey.running[1])
    assert survey.advance(2.0) == ()
    answer(survey, survey.running[0])
    assert survey.advance(3.0) == (MeasureKinds(peer=PeerId("b"), kinds=KINDS),)
    answer(survey, survey.running[0])
    assert survey.finished


def test_a_link_is_probed_when_neither_end_measures() -> None:
    survey = aimed([party("a"), party("b")], [pair("a", "b"), pair("a", None)])
    one, other = survey.advance(0.0)
    answer(survey, one)
    assert survey.advance(1.0) == (ProbeLink(number=1, pair=pair("a", None)),)
    answer(survey, other)
    assert survey.advance(1.5) == ()
    assert [request.link for request in survey.running if isinstance(request, ProbeLink)] == ["a - the coordinator"]
    answer(survey, survey.running[0])
    assert survey.advance(2.0) == (ProbeLink(number=2, pair=pair("a", "b")),)
    answer(survey, survey.running[0])
    assert survey.finished
    assert survey.advance(3.0) == ()
    assert survey.take_given_up() == ()


def test_latencies_to_the_coordinator_do_not_wait_for_each_other() -> None:
    survey = aimed([party("a"), party("b")], [pair(name, None, latency_only=True) for name in "ab"])
    for request in survey.advance(0.0):
        answer(survey, request)
    assert len(survey.advance(1.0)) == 2


def test_the_coordinator_is_asked_for_so_many_latencies_at_once() -> None:
    names = [f"peer-{index}" for index in range(LATENCIES_AT_ONCE + 3)]
    survey = aimed([party(name) for name in names], [pair(name, None, latency_only=True) for name in names])
    for request in survey.advance(0.0):
        answer(survey, request)
    begun = survey.advance(1.0)
    assert len(begun) == LATENCIES_AT_ONCE
    answer(survey, begun[0])
    assert len(survey.advance(2.0)) == 1


def test_a_peer_that_does_not_measure_is_given_up_and_its_links_are_probed_from_the_other_end() -> None:
    survey = aimed([party("a"), party("b")], [pair("a", "b"), pair("a", None)])
    answer(survey, survey.advance(0.0)[1])
    assert survey.deadline == 10.0
    assert survey.advance(9.9) == ()
    (probe,) = survey.advance(10.0)
    assert isinstance(probe, ProbeLink)
    assert probe.pair == pair("b", "a")
    answer(survey, probe)
    survey.advance(11.0)
    assert survey.finished
    assert survey.take_given_up() == (
        GivenUp(peer=PeerId("a"), pair=None, reason="it did not answer within 10 s"),
        GivenUp(peer=PeerId("a"), pair=pair("a", None), reason="it does not answer"),
    )


def test_each_answer_gives_time_for_the_next_kind() -> None:
    survey = aimed([party("a")], [])
    survey.advance(0.0)
    survey.measured(PeerId("a"), "embedding", 4.0)
    assert survey.deadline == 14.0
    survey.advance(14.0)
    assert survey.finished
    assert [given.reason for given in survey.take_given_up()] == ["it did not answer within 10 s"]
    assert survey.measured(PeerId("a"), "block", 15.0), "late is better than never"


def test_a_probe_that_fails_is_tried_from_the_other_end_once() -> None:
    survey = aimed([party("a"), party("b")], [pair("a", "b")])
    for request in survey.advance(0.0):
        answer(survey, request)
    for asker, other in (("a", "b"), ("b", "a")):
        (probe,) = survey.advance(1.0)
        assert isinstance(probe, ProbeLink)
        assert probe.pair == pair(asker, other)
        answer(survey, probe, f"{asker} cannot")
    assert survey.advance(1.0) == ()
    assert survey.take_given_up() == (GivenUp(peer=PeerId("a"), pair=pair("a", "b"), reason="a cannot; b cannot"),)


def test_what_is_known_is_not_asked_again_until_the_peer_is_gone() -> None:
    parties, pairs = [party("a"), party("b")], [pair("a", "b")]
    survey = aimed(parties, pairs)
    while requests := survey.advance(0.0):
        for request in requests:
            answer(survey, request)
    survey.aim([*parties, party("c")], [*pairs, pair("b", "c")])
    assert survey.advance(1.0) == (MeasureKinds(peer=PeerId("c"), kinds=KINDS),)
    answer(survey, survey.running[0])
    (probe,) = survey.advance(1.0)
    assert isinstance(probe, ProbeLink)
    assert probe.pair == pair("b", "c")
    survey.forget(PeerId("c"))
    assert survey.finished
    assert survey.running == ()
    assert survey.awaited(PeerId("b"), probe.number) is None, "nobody waits for it any more"
    assert survey.known_pairs == (pair("a", "b"),)
    survey.forget(PeerId("a"))
    survey.aim(parties, pairs)
    assert survey.advance(2.0) == (MeasureKinds(peer=PeerId("a"), kinds=KINDS),)


def test_nobody_answers_for_what_was_not_asked() -> None:
    survey = aimed([party("a"), party("b")], [pair("a", "b")])
    assert not survey.measured(PeerId("a"), "block", 0.0)
    survey.advance(0.0)
    assert not survey.measured(PeerId("a"), "something else", 0.0)
    assert survey.awaited(PeerId("a"), 1) is None


def test_giving_up_ends_everything_at_once() -> None:
    survey = aimed([party("a"), party("b")], [pair("a", "b")])
    answer(survey, survey.advance(0.0)[0])
    survey.give_up("time is up")
    assert survey.finished
    assert survey.advance(1.0) == ()
    assert [(given.peer, given.pair) for given in survey.take_given_up()] == [("b", None), ("a", pair("a", "b"))]


def occupied(request: Request, machines: dict[str, str]) -> list[str]:
    if isinstance(request, MeasureKinds):
        return [machines[request.peer]]
    ends = {request.pair.source, request.pair.target}
    return ["the coordinator" if end is None else machines[end] for end in ends]


@given(st.data())
def test_no_machine_is_in_two_things_and_all_ends_whoever_is_silent(data: st.DataObject) -> None:
    names = [f"peer-{index}" for index in range(data.draw(st.integers(1, 6), label="peers"))]
    machines = {name: data.draw(st.sampled_from(["x", "y", name]), label=name) for name in names}
    silent = set(data.draw(st.lists(st.sampled_from(names)), label="silent"))
    ends: list[tuple[str, str | None]] = [*combinations(names, 2), *((name, None) for name in names)]
    ends = [end for end in ends if end[1] is None or machines[end[0]] != machines[end[1]]]
    survey = aimed([party(name, machines[name]) for name in names], [pair(*end) for end in ends])
    now = 0.0
    asked: list[Request] = []
    while not survey.finished:
        asked += survey.advance(now)
        places = [place for request in survey.running for place in occupied(request, machines)]
        assert len(places) == len(set(places))
        waiting = [request for request in survey.running if request.peer not in silent]
        answers: bool = data.draw(st.booleans(), label="answers")
        if waiting and answers:
            failure = data.draw(st.sampled_from(["", "it cannot"]), label="how")
            answer(survey, data.draw(st.sampled_from(waiting), label="who"), failure, now)
        elif survey.running:
            now = survey.deadline
    assert now <= len(names) * 10.0 * len(KINDS) + 2 * len(ends) * 3.0
    # Nobody is asked again after its silence.
    for name in silent:
        assert len([request for request in asked if request.peer == name]) <= 1
    assert len({request.number for request in asked if isinstance(request, ProbeLink)}) == len(
        [request for request in asked if isinstance(request, ProbeLink)]
    )


def test_who_cannot_be_dialled_probes_and_where_neither_can_it_is_through_the_relay() -> None:
    behind = ProbeParty(name=PeerId("b"), reachable=False)
    survey = aimed([party("a"), behind], [pair("a", "b")])
    for request in survey.advance(0.0):
        answer(survey, request)
    assert survey.advance(1.0) == (ProbeLink(number=1, pair=pair("b", "a")),)
    answer(survey, survey.running[0], "no way out")
    assert survey.advance(2.0) == (ProbeLink(number=2, pair=pair("a", "b"), relay=True),)
