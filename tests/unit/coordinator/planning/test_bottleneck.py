"""What holds a pipeline back is named, and in words that say where."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from atoll.coordinator.planning.bottleneck import BottleneckKind, find_bottleneck
from atoll.coordinator.planning.pipeline import Link, Pipeline, StageTimes, Transfer
from atoll.coordinator.planning.simulator import simulate
from atoll.protocol.ids import PeerId

PEERS = (PeerId("attic"), PeerId("lab"), PeerId("cellar"))


def pipeline_of(
    *,
    seconds: tuple[float, float, float] = (0.1, 0.1, 0.1),
    rates: tuple[float, float] = (1e9, 1e9),
    latency: float = 0.0,
    upload: float = math.inf,
    in_flight: int = 32,
    num_microbatches: int = 32,
    update: float = 0.0,
) -> Pipeline:
    """Three stages that send a megabyte to one another; ``upload`` is that of the middle one."""
    stages = tuple(
        StageTimes(
            forward_seconds=one / 2,
            backward_seconds=one / 2,
            in_flight=in_flight,
            update_seconds=update if index == 1 else 0.0,
            upload_bytes_per_second=upload if index == 1 else math.inf,
        )
        for index, one in enumerate(seconds)
    )
    transfers = [Transfer(num_bytes=1e6, bytes_per_second=rate, latency_seconds=latency) for rate in rates]
    links = tuple(Link(forward=transfer, backward=transfer) for transfer in transfers)
    return Pipeline(stages=stages, links=links, num_microbatches=num_microbatches)


@pytest.mark.parametrize(
    ("pipeline", "kind", "stage", "words"),
    [
        (pipeline_of(seconds=(0.1, 0.5, 0.1)), BottleneckKind.COMPUTE, 1, "computing at lab (stage 1), busy for "),
        (pipeline_of(rates=(1e9, 2e6)), BottleneckKind.LINK, 1, "(976.6 KiB a microbatch at 16 Mbit/s), busy for "),
        (
            pipeline_of(rates=(2e6, 2e6), upload=2e6, seconds=(0.01, 0.01, 0.01)),
            BottleneckKind.LINE,
            1,
            "the upload of lab (1.9 MiB a microbatch to both neighbours at 16 Mbit/s), busy for ",
        ),
        (
            replace(
                pipeline_of(rates=(2e6, 2e6), seconds=(0.01, 0.01, 0.01)),
                relayed=frozenset({(0, 1), (1, 2)}),
                relay_bytes_per_second=2e6,
            ),
            BottleneckKind.LINE,
            0,
            "the coordinator's line at 16 Mbit/s, through which attic - lab, lab - ",
        ),
        (pipeline_of(latency=1.0, in_flight=2), BottleneckKind.MEMORY, 0, "memory at attic (stage 0): it holds 2 microbatches"),
        (pipeline_of(update=8.0), BottleneckKind.UPDATE, 1, "the optimizer at lab (stage 1), busy for "),
        (pipeline_of(num_microbatches=1), BottleneckKind.FILLING, 0, "(1 microbatch through 3 stages)"),
    ],
)
def test_it_is_named(pipeline: Pipeline, kind: BottleneckKind, stage: int, words: str) -> None:
    most = tuple(times.in_flight for times in pipeline.stages)
    found = find_bottleneck(PEERS, pipeline, simulate(pipeline), most)
    assert (found.kind, found.stage) == (kind, stage)
    assert words in found.sentence
    assert "\n" not in found.sentence


def test_processors_that_stages_share_are_named() -> None:
    stages = tuple(
        StageTimes(forward_seconds=0.1, backward_seconds=0.1, in_flight=8, machine="house" if index < 2 else "", cores=1)
        for index in range(3)
    )
    free = Transfer(num_bytes=0.0, bytes_per_second=1.0)
    pipeline = Pipeline(stages=stages, links=(Link(forward=free, backward=free),) * 2, num_microbatches=32)
    found = find_bottleneck(PEERS, pipeline, simulate(pipeline), (8, 8, 8))
    assert (found.kind, found.stage) == (BottleneckKind.COMPUTE, 0)
    assert found.sentence.startswith("computing on the 1 processor core that attic and lab share, busy for ")
    assert found.busy_share > 0.9


def test_memory_is_not_blamed_where_more_would_fit() -> None:
    pipeline = pipeline_of(latency=1.0, in_flight=2)
    assert find_bottleneck(PEERS, pipeline, simulate(pipeline), (32, 32, 32)).kind is BottleneckKind.FILLING
