"""What holds a pipeline back, as a value and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atoll.coordinator.planning.pipeline import Pipeline, Simulation
from atoll.coordinator.planning.processors import crowded, threads_of
from atoll.protocol.ids import PeerId
from atoll.protocol.job_errors import listed
from atoll.protocol.quantities import format_bytes, format_rate, format_seconds


class BottleneckKind(StrEnum):
    COMPUTE = "compute"
    UPDATE = "update"
    LINK = "link"
    LINE = "line"
    AVERAGING = "averaging"
    MEMORY = "memory"
    FILLING = "filling"


MOSTLY = 0.7
"""What is busy for this part of the step or more holds the pipeline back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """``busy_share`` is the part of the step for which the thing is busy; ``stage`` is that of the sender for a link."""

    kind: BottleneckKind
    stage: int
    busy_share: float
    sentence: str


def find_bottleneck(
    peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation, most_in_flight: tuple[int, ...]
) -> Bottleneck:
    """The busiest of machines, stages, links and lines; or what they wait for, when none of them is busy for most of the step.

    ``most_in_flight`` is how many microbatches each stage's memory holds.
    """
    found = [
        *_machines(peers, pipeline, simulation),
        *_computing(peers, pipeline, simulation),
        *_updating(peers, pipeline, simulation.step_seconds),
        *_links(peers, pipeline, simulation),
        *_lines(peers, pipeline, simulation.step_seconds),
        *_relay(peers, pipeline, simulation.step_seconds),
        *_averaging(peers, pipeline, simulation),
    ]
    busiest = max(found, key=lambda one: one.busy_share)
    once = busiest.kind in (BottleneckKind.UPDATE, BottleneckKind.AVERAGING)
    if busiest.busy_share >= MOSTLY or once or len(pipeline.stages) == 1:
        return busiest
    return _memory_bound(peers, pipeline, simulation, most_in_flight) or _filling(peers, pipeline, simulation, busiest)


def _filling(peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation, busiest: Bottleneck) -> Bottleneck:
    number = pipeline.num_microbatches
    stages = f"{len(pipeline.seats)} {'stage' if len(pipeline.seats) == 1 else 'stages'}"
    through = f"{number} {'microbatch' if number == 1 else 'microbatches'} through {stages}"
    share, step = f"{busiest.busy_share:.0%}", format_seconds(simulation.step_seconds)
    where = _names(peers, pipeline, busiest.stage)
    return Bottleneck(
        kind=BottleneckKind.FILLING,
        stage=busiest.stage,
        busy_share=busiest.busy_share,
        sentence=(
            f"filling and draining the pipeline ({through}): what is busiest, at {where}, is so for {share} of the {step}; "
            "more microbatches in a step would help"
        ),
    )


def _names(peers: tuple[PeerId, ...], pipeline: Pipeline, stage: int) -> str:
    return listed([str(peers[seat]) for seat in pipeline.seats[stage]], "and")


def _computing(peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation) -> list[Bottleneck]:
    step, found = simulation.step_seconds, []
    for seat, seconds in enumerate(simulation.compute_seconds):
        stage = pipeline.stage_of[seat]
        sentence = f"computing at {peers[seat]} (stage {stage}), {_busy(seconds / step, step)}"
        found.append(Bottleneck(kind=BottleneckKind.COMPUTE, stage=stage, busy_share=seconds / step, sentence=sentence))
    return found


def _machines(peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation) -> list[Bottleneck]:
    """Machines whose processors several stages share. ``stage`` is the first of them."""
    step, found = simulation.step_seconds, []
    for members, cores in crowded(pipeline.stages):
        busy = sum(threads_of(pipeline.stages[member], cores) * simulation.compute_seconds[member] for member in members)
        share = busy / cores / step
        words = f"{cores} processor core{'' if cores == 1 else 's'} that {listed([peers[one] for one in members], 'and')} share"
        found.append(
            Bottleneck(
                kind=BottleneckKind.COMPUTE,
                stage=pipeline.stage_of[members[0]],
                busy_share=share,
                sentence=f"computing on the {words}, {_busy(share, step)}",
            )
        )
    return found


def _updating(peers: tuple[PeerId, ...], pipeline: Pipeline, step: float) -> list[Bottleneck]:
    """What stages do once a step, whatever its microbatches: norms of gradients, and the optimizer."""
    found = []
    for seat, times in enumerate(pipeline.stages):
        stage = pipeline.stage_of[seat]
        share = (times.update_seconds + times.finish_seconds) / step
        sentence = (
            f"the optimizer at {peers[seat]} (stage {stage}), {_busy(share, step)}; a larger training.batch would pay for it "
            "less often"
        )
        found.append(Bottleneck(kind=BottleneckKind.UPDATE, stage=stage, busy_share=share, sentence=sentence))
    return found


def _links(peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation) -> list[Bottleneck]:
    step, found = simulation.step_seconds, []
    for index, (link, busy) in enumerate(zip(pipeline.links, simulation.sent_seconds, strict=True)):
        one, other = pipeline.ends[index]
        there, back = (peers[one], peers[other]), (peers[other], peers[one])
        for transfer, seconds, (source, target) in ((link.forward, busy[0], there), (link.backward, busy[1], back)):
            load = f"{format_bytes(transfer.num_bytes)} a microbatch at {format_rate(transfer.bytes_per_second)}"
            sentence = f"the link from {source} to {target} ({load}), {_busy(seconds / step, step)}"
            stage = pipeline.stage_of[one]
            found.append(Bottleneck(kind=BottleneckKind.LINK, stage=stage, busy_share=seconds / step, sentence=sentence))
    return found


def _lines(peers: tuple[PeerId, ...], pipeline: Pipeline, step: float) -> list[Bottleneck]:
    """Uploads and downloads that serve neighbours on both sides."""
    found = []
    for seat, times in enumerate(pipeline.stages):
        sent, received, sides = 0.0, 0.0, set()
        for link, ends, load in zip(pipeline.links, pipeline.ends, pipeline.loads, strict=True):
            if seat in ends:
                onward = ends[0] == seat
                sides.add(onward)
                sent += load * (link.forward if onward else link.backward).num_bytes
                received += load * (link.backward if onward else link.forward).num_bytes
        if len(sides) < 2:
            continue
        own = pipeline.holders[pipeline.stage_of[seat]].count(seat)
        for word, num_bytes, rate in (
            ("upload", sent, times.upload_bytes_per_second),
            ("download", received, times.download_bytes_per_second),
        ):
            share = num_bytes / rate / step
            load_words = f"{format_bytes(num_bytes / own)} a microbatch to both neighbours at {format_rate(rate)}"
            sentence = f"the {word} of {peers[seat]} ({load_words}), {_busy(share, step)}"
            stage = pipeline.stage_of[seat]
            found.append(Bottleneck(kind=BottleneckKind.LINE, stage=stage, busy_share=share, sentence=sentence))
    return found


def _relay(peers: tuple[PeerId, ...], pipeline: Pipeline, step: float) -> list[Bottleneck]:
    """The coordinator's line, where several pairs meet there."""
    sent, pairs = 0.0, []
    for link, ends, load in zip(pipeline.links, pipeline.ends, pipeline.loads, strict=True):
        if ends in pipeline.relayed:
            sent += load * (link.forward.num_bytes + link.backward.num_bytes)
            pairs.append(ends)
    share = sent / pipeline.relay_bytes_per_second / step
    if not share:
        return []
    between = ", ".join(f"{peers[one]} - {peers[other]}" for one, other in pairs)
    sentence = (
        f"the coordinator's line at {format_rate(pipeline.relay_bytes_per_second)}, through which {between} go because neither "
        f"of them can be dialled, {_busy(share, step)}; open a port at one of each"
    )
    stage = pipeline.stage_of[pairs[0][0]]
    return [Bottleneck(kind=BottleneckKind.LINE, stage=stage, busy_share=share, sentence=sentence)]


def _averaging(peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation) -> list[Bottleneck]:
    """What replicas wait for at a step's end."""
    step, found = simulation.step_seconds, []
    for stage, seconds in enumerate(simulation.averaging_seconds):
        if len(pipeline.seats[stage]) > 1:
            share = seconds / step
            sentence = (
                f"summing the gradients of {_names(peers, pipeline, stage)} (stage {stage}), {_busy(share, step)}; a larger "
                "training.batch would pay for it less often"
            )
            found.append(Bottleneck(kind=BottleneckKind.AVERAGING, stage=stage, busy_share=share, sentence=sentence))
    return found


def _busy(share: float, step: float) -> str:
    return f"busy for {share:.0%} of the {format_seconds(step)} that a step takes"


def _memory_bound(
    peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation, most_in_flight: tuple[int, ...]
) -> Bottleneck | None:
    """A seat that may hold fewer microbatches than the way through the later stages and back would keep busy."""
    step = simulation.step_seconds
    loops = [0.0] * len(pipeline.stages)
    for seat in range(len(pipeline.stages) - 1, -1, -1):
        times = pipeline.stages[seat]
        ways = [
            link.forward.seconds + link.backward.seconds + loops[other]
            for link, (one, other) in zip(pipeline.links, pipeline.ends, strict=True)
            if one == seat
        ]
        loop = loops[seat] = times.microbatch_seconds + max(ways, default=0.0)
        held, stage = times.in_flight, pipeline.stage_of[seat]
        own = pipeline.holders[stage].count(seat)
        if most_in_flight[seat] <= held < own and loop / held * own >= MOSTLY * step:
            return Bottleneck(
                kind=BottleneckKind.MEMORY,
                stage=stage,
                busy_share=loop / held * own / step,
                sentence=(
                    f"memory at {peers[seat]} (stage {stage}): it holds {held} microbatches, and one is back only after "
                    f"{format_seconds(loop)}"
                ),
            )
    return None
