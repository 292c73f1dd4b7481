"""The last plan of a run that is taken up: it is used again as it is, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.journal import JOURNAL, Journal
from atoll.coordinator.traced_model import TracedModel, trace_model
from atoll.protocol.ids import Generation, NodeIndex, PeerId
from support.coordinated import tiny_job
from support.placements import placed

GB = 10**9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TracedModel:
    folder = tmp_path_factory.mktemp("traced")
    job = tiny_job(folder)
    return trace_model(job, open_feed(job, folder / "cache"))


@pytest.fixture
def plan(model: TracedModel) -> Plan:
    return replace(placed(("a", 1), (("b", "c"), 2)).proposal(model).plan, spares=(PeerId("d"),))


def offers(*names: str, memory_bytes: int = GB) -> list[PeerOffer]:
    return [PeerOffer(name=PeerId(name), flops_per_second=1e9, memory_bytes=memory_bytes) for name in names]


def test_with_all_its_peers_it_is_what_it_was(model: TracedModel, plan: Plan) -> None:
    found = model.as_before(offers("e", "c", "b", "a"), plan)
    assert found is not None
    assert found.plan == replace(plan, spares=(PeerId("e"),))
    assert [graph.stage for graph in found.graphs] == [0, 1]
    assert [summary.peers for summary in found.summaries] == [("a",), ("b", "c")]


def test_without_one_of_them_or_its_memory_or_its_cuts_another_is_wanted(model: TracedModel, plan: Plan) -> None:
    assert model.as_before(offers("a", "b", "d"), plan) is None
    assert model.as_before(offers("a", "b", "c", memory_bytes=10**7), plan) is None
    first, second = plan.stages
    cut = NodeIndex(first.end + 1)
    assert cut not in model.segments.positions
    moved = replace(plan, stages=(replace(first, end=cut), replace(second, first=cut)))
    assert model.as_before(offers("a", "b", "c"), moved) is None


def test_the_journal_gives_a_real_plan_back_as_it_was(model: TracedModel, tmp_path: Path) -> None:
    made = model.propose(offers("a", "b")).plan
    assert made.links
    journal = Journal.create(tmp_path / JOURNAL, name="tiny", seed=0, job="", steps=5)
    journal.write_plan(Generation(1), made)
    assert journal.resumption().plan == made
    journal.close()
