"""What `Operator.Fleet` tells is what a plan needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.coordinator.fleet_report import fleet_reply, measured_in, network_in, offers_in
from atoll.coordinator.planning.network import LinkMeasurement, Relayed, build_network
from atoll.coordinator.sessions.membership import Introduction, Member
from atoll.coordinator.survey.probe_results import peer_lines
from atoll.coordinator.survey.probe_schedule import probe_party
from atoll.protocol.ids import PeerId
from atoll.protocol.v1 import operator_pb2, session_pb2

A, B, C = (PeerId(name) for name in "abc")


def member(name: PeerId, **said: object) -> Member:
    fields: dict[str, object] = {
        "protocol_version": 2,
        "version": "0",
        "name": name,
        "address": "127.0.0.1:1",
        "device": "cpu",
        "threads": 2,
        "memory_bytes": 100,
        "flops_per_second": 1e9,
        "machine": "host",
        "cores": 4,
        **said,
    }
    return Member(introduction=Introduction(**fields), heard=0.0)  # type: ignore[arg-type]  # fields of many types


def test_a_fleet_arrives_as_it_was_told() -> None:
    members = [member(A), member(B, max_upload_bytes_per_second=5e5), member(C, machine="other")]
    links = [
        LinkMeasurement(source=A, target=B, bytes_per_second=2e6, latency_seconds=0.01),
        LinkMeasurement(source=B, target=A, bytes_per_second=1e6, latency_seconds=0.02),
    ]
    network = build_network((A, B, C), links, peer_lines(probe_party(one.introduction) for one in members))
    network = replace(network, relayed=Relayed(pairs=frozenset({frozenset((A, C))}), bytes_per_second=3e6))
    measured = {A: (session_pb2.Measured(kind="f00", forward_seconds=0.5),)}
    wire = fleet_reply(members, measured, network, {B: 0.25}, {C}).SerializeToString()
    reply = operator_pb2.FleetReply.FromString(wire)
    offers = offers_in(reply)
    assert [(offer.name, offer.machine, offer.cores, offer.threads) for offer in offers] == [
        (A, "host", 4, 2),
        (B, "host", 4, 2),
        (C, "other", 4, 2),
    ]
    assert [offer.coordinator_round_trip_seconds for offer in offers] == [0.0, 0.25, 0.0]
    assert [offer.vouched for offer in offers] == [False, False, True]
    assert measured_in(reply)[A]["f00"].forward_seconds == pytest.approx(0.5)
    assert measured_in(reply)[B] == {}
    arrived = network_in(reply)
    for name in ("rate", "latency", "upload", "download", "estimated"):
        np.testing.assert_array_equal(getattr(arrived, name), getattr(network, name))
    assert arrived.relayed == network.relayed
    assert arrived.rate[1, 0] == 5e5  # the owner's cap, though more was measured
    assert not arrived.estimated[0, 1]
    assert arrived.estimated[0, 2]
