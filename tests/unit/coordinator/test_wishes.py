"""Pins and trusted ends: from the job to the planner."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from atoll.coordinator.planning.network import build_network
from atoll.coordinator.planning.planner import PlanRequest, plan_placement
from atoll.coordinator.planning.segments import PeerOffer, Segments
from atoll.coordinator.tracing.rehearsal import rehearse
from atoll.coordinator.tracing.segments import segments_of
from atoll.coordinator.wishes import constraints_of, offers_under, pinned_segments
from atoll.protocol.errors import JobError, PlacementError
from atoll.protocol.ids import NodeIndex, PeerId
from atoll.protocol.job import Job
from support.graphs import gpt_graph
from support.planning import equal_segments, peers_of

PEERS = peers_of([1e9, 2e9, 3e9])


@cache
def segments() -> Segments:
    return segments_of(rehearse(gpt_graph()), copies=3)


def job_with(**plan: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"builtin": "gpt", "options": {"layers": 2, "width": 8, "heads": 2, "context": 8, "vocabulary": 32}},
            "data": {"random": {"kind": "tokens", "vocabulary": 32}, "sequence_length": 8},
            "training": {"steps": 1, "batch": 8, "microbatch": 1},
            "plan": plan,
        }
    )


def planned_peers(job: Job, peers: tuple[PeerOffer, ...] = PEERS) -> dict[int, PeerId]:
    """The peer of each segment."""
    request = PlanRequest(
        segments=segments(),
        peers=offers_under(job, peers),
        network=build_network(peer.name for peer in peers),
        constraints=constraints_of(job, pinned_segments(job, gpt_graph(), segments())),
    )
    stages = plan_placement(request).seats
    return {segment: stage.peer for stage in stages for segment in range(stage.first, stage.end)}


def test_a_pinned_module_is_held_by_its_peer() -> None:
    job = job_with(pin={"head": "peer-00", "blocks.0": "peer-01"}, stages=3)
    pins = pinned_segments(job, gpt_graph(), segments())
    assert {peer for _, peer in pins} == {"peer-00", "peer-01"}
    peers = planned_peers(job)
    assert all(peers[segment] == owner for segment, owner in pins)


def test_without_pins_nothing_is_pinned() -> None:
    assert pinned_segments(job_with(), gpt_graph(), segments()) == ()
    assert offers_under(job_with(), PEERS) == PEERS


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(
        JobError, match=r"plan.pin.block.0: the model has no module with parameters .*; did you mean 'blocks.0'\?"
    ):
        pinned_segments(job_with(pin={"block.0": "peer-00"}), gpt_graph(), segments())


def test_what_cannot_be_cut_apart_is_pinned_to_one_peer() -> None:
    whole = dataclasses.replace(equal_segments(1), positions=(NodeIndex(0), NodeIndex(len(gpt_graph().nodes))))
    job = job_with(pin={"token_embedding": "peer-00", "head": "peer-01"})
    with pytest.raises(JobError, match=r"meets head where the model cannot be cut; pin both to one peer"):
        pinned_segments(job, gpt_graph(), whole)


def test_a_pinned_peer_that_has_not_joined() -> None:
    with pytest.raises(PlacementError, match=r"plan.pin gives head to 'lab', which has not joined; start it or remove the pin"):
        offers_under(job_with(pin={"head": "lab"}), PEERS)


def test_ends_are_kept_on_trusted_peers() -> None:
    peers = planned_peers(job_with(trusted=["peer-00", "peer-02"], trusted_ends=True, stages=3))
    assert {peers[0], peers[segments().num_segments - 1]} == {"peer-00", "peer-02"}
    alone = planned_peers(job_with(trusted=["peer-00"], trusted_ends=True))
    assert set(alone.values()) == {"peer-00"}


def test_a_fleet_may_trust_fewer() -> None:
    doubted = tuple(dataclasses.replace(peer, trusted=peer.name != "peer-00") for peer in PEERS)
    job = job_with(trusted=["peer-00", "peer-01"], trusted_ends=True)
    assert [peer.name for peer in offers_under(job, doubted) if peer.trusted] == ["peer-01"]


def test_nobody_trusted_has_joined() -> None:
    with pytest.raises(PlacementError, match=r"needs one of plan.trusted \(lab\) or a peer .* --role trusted`, and none has"):
        offers_under(job_with(trusted=["lab"], trusted_ends=True), PEERS)
    with pytest.raises(
        PlacementError, match=r"plan.trusted_ends needs a peer that was invited with `atoll invite --role trusted`"
    ):
        offers_under(job_with(trusted_ends=True), PEERS)


def test_who_was_invited_as_trusted_is() -> None:
    vouched = tuple(dataclasses.replace(peer, vouched=peer.name == "peer-01") for peer in PEERS)
    offers = offers_under(job_with(trusted_ends=True), vouched)
    assert [peer.name for peer in offers if peer.trusted] == ["peer-01"]
    offers = offers_under(job_with(trusted=["peer-02"], trusted_ends=True), vouched)
    assert [peer.name for peer in offers if peer.trusted] == ["peer-01", "peer-02"]
    assert offers_under(job_with(), vouched) == vouched
