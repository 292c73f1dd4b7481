"""Several peers join at once, over lines much slower than the steps, or more than there is work for: nobody waits for them."""

from __future__ import annotations

from pathlib import Path

from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.events import PausedEvent, PeerEvent, PlanEvent, ReplayedEvent, StepEvent, VoidEvent
from atoll.coordinator.run.prefetching import MOST_PREPARED
from atoll.coordinator.traced_model import trace_model
from atoll.peer.state.snapshot_part import Part
from atoll.protocol.errors import DamagedSnapshot
from atoll.protocol.folders import paths_in
from atoll.protocol.job import Compression, NetworkSection
from support.coordinated import Coordinated, coordinated, tiny_job
from support.reference import train_plainly

JOINERS = ("c", "d", "e", "f", "g")
STEPS, SNAPSHOT_EVERY = 400, 20
SLOW_BYTES_PER_SECOND = 500_000.0
"""So that what a joiner fetches takes several steps."""


def tensors_on_disk(folder: Path) -> dict[int, set[str]]:
    """What a peer's disk has of each snapshot, by step."""
    found: dict[int, set[str]] = {}
    for path in paths_in(folder, "snapshots/*/*/*.safetensors"):
        try:
            manifest = Part(path).manifest
        except (OSError, DamagedSnapshot):  # it is being rotated away this moment
            continue
        found.setdefault(manifest.step, set()).update(entry.name for entry in manifest.tensors)
    return found


def prepared(folder: Path) -> set[str]:
    """The joiners that have a whole snapshot on their disks."""
    disks = {name: tensors_on_disk(folder / name) for name in ("a", "b", *JOINERS)}
    whole = set().union(*disks["a"].values()) | set().union(*disks["b"].values())
    return {name for name in JOINERS if any(has >= whole for has in disks[name].values())}


def spares(run: Coordinated) -> set[str]:
    return {event.name for event in run.told(PeerEvent) if event.state == "spare"}


async def test_five_joiners_are_made_ready_beside_training_and_one_takes_over(tmp_path: Path) -> None:
    """Row 22: donors serve without stopping, a joiner has a stage only from a step's end on, and few fetch at a time."""
    job = tiny_job(tmp_path, steps=STEPS, plan={"stages": 2}, options={"tied": False})
    durability = job.durability.model_copy(update={"snapshot_every": SNAPSHOT_EVERY, "copies": 0})
    raw = NetworkSection(compression=Compression(forward="raw", backward="raw"))  # a slow line would lose bits otherwise
    job = job.model_copy(update={"durability": durability, "network": raw})
    async with coordinated(job, tmp_path / "state", peers=0, min_peers=2) as run:
        for name in ("a", "b"):
            run.join(name, cache=tmp_path / name)
        await run.until(lambda: run.coordinator.status().HasField("complete_snapshot"))
        before = run.told(StepEvent)[-1].step
        for name in JOINERS:
            run.join(name, cache=tmp_path / name, max_download=SLOW_BYTES_PER_SECOND)
        await run.until(lambda: spares(run) >= set(JOINERS), "not all joined")
        await run.until(lambda: len(prepared(tmp_path)) >= MOST_PREPARED, "no joiner was ever ready")
        assert run.told(StepEvent)[-1].step > before, "training went on meanwhile"
        assert not run.told(VoidEvent)
        assert len({event.generation for event in run.told(StepEvent)}) == len(run.told(PlanEvent))
        lost = run.told(PlanEvent)[-1].stages[1].peers[0]
        run.kill(lost)
        assert (await run.ended()).finished
    assert not run.told(PausedEvent)
    used = {peer for stage in run.told(PlanEvent)[-1].stages for peer in stage.peers}
    assert lost not in used
    assert used & set(JOINERS), "who else could have taken over"
    assert all(event.equal for event in run.told(ReplayedEvent))
    assert [event.loss for event in run.told(StepEvent)] == list(train_plainly(job, tmp_path / "cache").losses)


async def test_of_more_peers_than_the_model_can_be_cut_for_two_are_left_over(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, steps=2, options={"layers": 1})
    most = trace_model(job, open_feed(job, tmp_path / "cache")).segments.num_segments
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"stages": most})})
    async with coordinated(job, tmp_path / "state", peers=most + 2) as run:
        assert (await run.ended()).finished
    (plan,) = run.told(PlanEvent)
    used = [peer for stage in plan.stages for peer in stage.peers]
    assert len(plan.stages) == len(set(used)) == len(used) == most
