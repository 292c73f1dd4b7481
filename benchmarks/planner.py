"""How much faster a planned step is than one placed by OP-Fence (FusionLLM) or by an equal split, over many swarms.

python benchmarks/planner.py            all matrices in benchmarks/link_matrices and random links; some minutes
python benchmarks/planner.py --instances 2 --peers 8

"OP-Fence, same peers" is OP-Fence on the peers that the plan uses, which leaves the order and the cuts as the only
difference. Every placement is judged on the event simulator, which asserts the closed forms of pipeline theory in the
tests. Prints for each kind of network the distribution of the speed-up, then the time that planning took, and as the
last line the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass

import numpy as np

from atoll.coordinator.planning.costs import Constraints, cost_table, memory_table
from atoll.coordinator.planning.planner import PlanRequest, plan_placement
from atoll.coordinator.planning.prediction import Predictor
from atoll.coordinator.planning.segments import PeerOffer, Segments, StageMemory
from atoll.protocol.ids import NodeIndex
from link_swarms import NETWORKS, peers_of
from planner_baselines import equal_split, op_fence

BASELINES = ("OP-Fence", "equal split", "OP-Fence, same peers")
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class TransformerMemory:
    """A transformer's blocks between an embedding and a head, AdamW in mixed precision."""

    weights: tuple[float, ...]
    activations: float
    crossing: float

    def __call__(self, first: int, end: int, recompute: bool) -> StageMemory:
        state = int(16.0 * sum(self.weights[first:end]))
        saved, moving = int(self.activations * (end - first)), int(4 * self.crossing)
        if recompute:
            return StageMemory(fixed_bytes=state + saved, microbatch_bytes=moving)
        return StageMemory(fixed_bytes=state, microbatch_bytes=saved + moving)


def transformer(blocks: int, width: int, tokens: int) -> Segments:
    """A GPT of ``blocks`` blocks and ``width``, a microbatch of ``tokens`` tokens, bf16 between stages.

    A block is cut in the middle as well: attention, then the feed-forward part. The embedding and the head (a
    vocabulary of 32 k) belong to the first and the last segment.
    """
    attention, feed_forward, table = 4.0 * width**2, 8.0 * width**2, 32_000.0 * width
    weights = [attention, feed_forward] * blocks
    flops = [2.0 * tokens * (attention + tokens * width), 2.0 * tokens * feed_forward] * blocks
    flops[-1] += 2.0 * tokens * table
    sums = np.concatenate([[0.0], np.cumsum(flops)])
    weights[0] += table
    weights[-1] += table
    crossing = 2.0 * tokens * width
    edges = (0.0, *([crossing] * (len(flops) - 1)), 0.0)
    return Segments(
        positions=tuple(NodeIndex(index) for index in range(len(sums))),
        forward_flops=tuple(float(value) for value in sums),
        backward_flops=tuple(2.0 * float(value) for value in sums),
        parameter_bytes=tuple(4.0 * float(value) for value in np.concatenate([[0.0], np.cumsum(weights)])),
        forward_bytes=edges,
        backward_bytes=edges,
        memory=TransformerMemory(tuple(weights), 17.0 * tokens * width, crossing),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """One swarm: the planned step, those of the baselines (None: it does not fit), and how long planning took."""

    planned: float
    baselines: dict[str, float | None]
    num_stages: int
    planning_seconds: float


def compare(request: PlanRequest) -> Outcome:
    """Plan ``request`` in each way and simulate the outcomes."""
    started = time.monotonic()
    planned = plan_placement(request)
    planning_seconds = time.monotonic() - started
    used = {stage.peer for stage in planned.seats}
    everyone = _predictor(request, request.peers)
    chosen = _predictor(request, tuple(peer for peer in request.peers if peer.name in used))
    layouts = {
        "OP-Fence": (everyone, op_fence(everyone)),
        "equal split": (everyone, equal_split(everyone)),
        "OP-Fence, same peers": (chosen, op_fence(chosen)),
    }
    baselines = {
        name: None if layout is None else predictor.step_seconds(layout) for name, (predictor, layout) in layouts.items()
    }
    return Outcome(planned.step_seconds, baselines, len(planned.seats), planning_seconds)


def _predictor(request: PlanRequest, peers: tuple[PeerOffer, ...]) -> Predictor:
    network = request.network.select([peer.name for peer in peers])
    memory = memory_table(request.segments)
    table = cost_table(request.segments, peers, network, request.constraints, memory)
    return Predictor.of(request.segments, peers, network, request.constraints, memory, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--instances", type=int, default=10, help="swarms of each kind (default 10)")
    parser.add_argument("--peers", type=int, nargs="+", default=[8, 16, 32], help="sizes of swarms, taken in turn")
    parser.add_argument("--blocks", type=int, default=24, help="blocks of the transformer (default 24)")
    parser.add_argument("--width", type=int, default=2048, help="its width (default 2048: 1.3 billion parameters)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a microbatch (default 2048)")
    parser.add_argument("--microbatches", type=int, default=64, help="microbatches in a step (default 64)")
    options = parser.parse_args()
    segments = transformer(options.blocks, options.width, options.tokens)
    constraints = Constraints(num_microbatches=options.microbatches)
    print(f"{'network':14}{'against':22}{'least':>7}{'1/4':>7}{'median':>8}{'3/4':>7}{'most':>7}   swarms")
    summary = {}
    for kind, network_of in NETWORKS.items():
        outcomes = []
        for seed in range(options.instances):
            generator = np.random.default_rng(seed)
            count = options.peers[seed % len(options.peers)]
            peers, network = peers_of(count, generator), network_of(count, generator)
            outcomes.append(compare(PlanRequest(segments=segments, peers=peers, network=network, constraints=constraints)))
            print(f"{kind}: swarm {seed + 1} of {options.instances}", file=sys.stderr, flush=True)
        summary[kind] = summarise(kind, outcomes)
    print(json.dumps(summary))


def summarise(kind: str, outcomes: list[Outcome]) -> dict[str, object]:
    """Print the rows of one kind of network, and return them."""
    result: dict[str, object] = {
        "planned_step_seconds": [outcome.planned for outcome in outcomes],
        "stages": [outcome.num_stages for outcome in outcomes],
        "planning_seconds": [outcome.planning_seconds for outcome in outcomes],
    }
    for name in BASELINES:
        ratios = [seconds / outcome.planned for outcome in outcomes if (seconds := outcome.baselines[name]) is not None]
        result[name] = ratios
        if ratios:
            least, quarter, median, three_quarters, most = (float(value) for value in np.quantile(ratios, QUANTILES))
            row = f"{least:7.2f}{quarter:7.2f}{median:8.2f}{three_quarters:7.2f}{most:7.2f}"
        else:
            row = " " * 36
        unfit = len(outcomes) - len(ratios)
        print(f"{kind:14}{name:22}{row}   {len(ratios)}" + (f", {unfit} more do not fit" if unfit else ""))
    slowest = max(outcome.planning_seconds for outcome in outcomes)
    print(f"{'':14}planning took {slowest:.1f} s at most")
    return result


if __name__ == "__main__":
    main()
