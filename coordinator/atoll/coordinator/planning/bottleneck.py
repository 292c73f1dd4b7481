"""What holds a pipeline back, as a value and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atoll.coordinator.planning.pipeline import Pipeline, Simulation
from atoll.coordinator.planning.processors import crowded, threads_of
from atoll.coordinator.planning.quantities import format_bytes, format_rate, format_seconds
from atoll.protocol.ids import PeerId
from atoll.protocol.job_errors import listed


class BottleneckKind(StrEnum):
    COMPUTE = "compute"
    UPDATE = "update"
    LINK = "link"
    LINE = "line"
    MEMORY = "memory"
    FILLING = "filling"


MOSTLY = 0.7
"""What is busy for this part of the step or more holds the pipeline back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """``busy_share`` is the part of the step for which the thing is busy; ``stage`` is the sender's for a link."""

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
        *_computing(peers, simulation),
        *_updating(peers, pipeline, simulation.step_seconds),
        *_links(peers, pipeline, simulation),
        *_lines(peers, pipeline, simulation.step_seconds),
    ]
    busiest = max(found, key=lambda one: one.busy_share)
    if busiest.busy_share >= MOSTLY or busiest.kind is BottleneckKind.UPDATE or len(pipeline.stages) == 1:
        return busiest
    return _memory_bound(peers, pipeline, simulation, most_in_flight) or _filling(peers, pipeline, simulation, busiest)


def _filling(peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation, busiest: Bottleneck) -> Bottleneck:
    number = pipeline.num_microbatches
    through = f"{number} {'microbatch' if number == 1 else 'microbatches'} through {len(pipeline.stages)} stages"
    share, step = f"{busiest.busy_share:.0%}", format_seconds(simulation.step_seconds)
    return Bottleneck(
        kind=BottleneckKind.FILLING,
        stage=busiest.stage,
        busy_share=busiest.busy_share,
        sentence=(
            f"filling and draining the pipeline ({through}): what is busiest, at {peers[busiest.stage]}, is so for {share} "
            f"of the {step}; more microbatches in a step would help"
        ),
    )


def _computing(peers: tuple[PeerId, ...], simulation: Simulation) -> list[Bottleneck]:
    step, found = simulation.step_seconds, []
    for stage, seconds in enumerate(simulation.compute_seconds):
        sentence = f"computing at {peers[stage]} (stage {stage}), {_busy(seconds / step, step)}"
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
                stage=members[0],
                busy_share=share,
                sentence=f"computing on the {words}, {_busy(share, step)}",
            )
        )
    return found


def _updating(peers: tuple[PeerId, ...], pipeline: Pipeline, step: float) -> list[Bottleneck]:
    """What stages do once a step, whatever its microbatches: norms of gradients, and the optimizer."""
    found = []
    for stage, times in enumerate(pipeline.stages):
        share = (times.update_seconds + times.finish_seconds) / step
        sentence = (
            f"the optimizer at {peers[stage]} (stage {stage}), {_busy(share, step)}; a larger training.batch would pay for it "
            "less often"
        )
        found.append(Bottleneck(kind=BottleneckKind.UPDATE, stage=stage, busy_share=share, sentence=sentence))
    return found


def _links(peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation) -> list[Bottleneck]:
    step, found = simulation.step_seconds, []
    for index, (link, busy) in enumerate(zip(pipeline.links, simulation.sent_seconds, strict=True)):
        there, back = (peers[index], peers[index + 1]), (peers[index + 1], peers[index])
        for transfer, seconds, (source, target) in ((link.forward, busy[0], there), (link.backward, busy[1], back)):
            load = f"{format_bytes(transfer.num_bytes)} a microbatch at {format_rate(transfer.bytes_per_second)}"
            sentence = f"the link from {source} to {target} ({load}), {_busy(seconds / step, step)}"
            found.append(Bottleneck(kind=BottleneckKind.LINK, stage=index, busy_share=seconds / step, sentence=sentence))
    return found


def _lines(peers: tuple[PeerId, ...], pipeline: Pipeline, step: float) -> list[Bottleneck]:
    """Uploads and downloads that serve two neighbours."""
    found = []
    for stage, times in enumerate(pipeline.stages):
        before = pipeline.links[stage - 1] if stage > 0 else None
        after = pipeline.links[stage] if stage < len(pipeline.links) else None
        if before is None or after is None:
            continue
        sent = before.backward.num_bytes + after.forward.num_bytes
        received = before.forward.num_bytes + after.backward.num_bytes
        for word, num_bytes, rate in (
            ("upload", sent, times.upload_bytes_per_second),
            ("download", received, times.download_bytes_per_second),
        ):
            share = num_bytes * pipeline.num_microbatches / rate / step
            load = f"{format_bytes(num_bytes)} a microbatch to both neighbours at {format_rate(rate)}"
            sentence = f"the {word} of {peers[stage]} ({load}), {_busy(share, step)}"
            found.append(Bottleneck(kind=BottleneckKind.LINE, stage=stage, busy_share=share, sentence=sentence))
    return found


def _busy(share: float, step: float) -> str:
    return f"busy for {share:.0%} of the {format_seconds(step)} that a step takes"


def _memory_bound(
    peers: tuple[PeerId, ...], pipeline: Pipeline, simulation: Simulation, most_in_flight: tuple[int, ...]
) -> Bottleneck | None:
    """A stage that may hold fewer microbatches than the way through the later stages and back would keep busy."""
    step = simulation.step_seconds
    loop = 0.0
    for stage in range(len(pipeline.stages) - 1, -1, -1):
        times = pipeline.stages[stage]
        loop += times.microbatch_seconds
        if stage < len(pipeline.links):
            loop += pipeline.links[stage].forward.seconds + pipeline.links[stage].backward.seconds
        held = times.in_flight
        full = most_in_flight[stage] <= held < pipeline.num_microbatches
        if full and loop / held * pipeline.num_microbatches >= MOSTLY * step:
            return Bottleneck(
                kind=BottleneckKind.MEMORY,
                stage=stage,
                busy_share=loop / held * pipeline.num_microbatches / step,
                sentence=(
                    f"memory at {peers[stage]} (stage {stage}): it holds {held} microbatches, and one is back only after "
                    f"{format_seconds(loop)}"
                ),
            )
    return None
