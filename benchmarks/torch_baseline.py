"""One process of the baseline: a stage of the GPT under torch.distributed.pipelining (1F1B, gloo, fp32).

Started once a rank by ``pipeline.py``. The stages are parts of the very model that Atoll trains. Rank 0, whose backward pass
ends a step, prints one line of JSON: the seconds of each step and the peak memory of its process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from datetime import timedelta

import psutil
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from atoll.coordinator.models.gpt import GPT
from setting import Setting

RENDEZVOUS = timedelta(seconds=120)


class Part(nn.Module):
    """A stage's share of the blocks, with the embeddings before them or the head behind them where they belong."""

    def __init__(self, gpt: GPT, rank: int, num_stages: int) -> None:
        super().__init__()
        share = len(gpt.blocks) // num_stages
        self.blocks = gpt.blocks[rank * share : (rank + 1) * share]
        self.embeddings = nn.ModuleList([gpt.token_embedding, gpt.position_embedding] if rank == 0 else [])
        self.head = nn.Sequential(gpt.norm, gpt.head) if rank == num_stages - 1 else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embeddings:
            tokens, positions = self.embeddings
            hidden = tokens(hidden) + positions(torch.arange(hidden.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy, as in Atoll's GPT."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def interface_of(address: str) -> str:
    """The network interface that has ``address``; gloo asks for its name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise SystemExit(f"torch_baseline: no interface of this host has the address {address}")


def train(setting: Setting, rank: int) -> list[float]:
    """All steps of this rank; the seconds of those after the warm-up."""
    torch.manual_seed(0)
    part = Part(GPT(**setting.gpt_options()), rank, setting.stages)
    stage = PipelineStage(part, rank, setting.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, setting.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=setting.learning_rate, foreach=False)
    last = rank == setting.stages - 1
    ends = [time.perf_counter()]
    for _ in range(setting.warmup + setting.steps):
        rows = torch.randint(setting.vocabulary, (setting.batch, setting.context + 1))
        inputs = (rows[:, :-1].contiguous(),) if rank == 0 else ()
        target = rows[:, 1:].contiguous() if last else None
        schedule.step(*inputs, target=target, losses=[] if last else None, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return [end - before for before, end in itertools.pairwise(ends)][setting.warmup :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", required=True, help="the setting as JSON")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True, help="this rank's own address")
    parser.add_argument("--rendezvous", required=True, metavar="HOST:PORT", help="where rank 0 listens")
    options = parser.parse_args()
    setting = Setting.from_json(options.setting)
    torch.set_num_threads(setting.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(options.address)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{options.rendezvous}",
        rank=options.rank,
        world_size=setting.stages,
        timeout=RENDEZVOUS,
    )
    seconds = train(setting, options.rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if options.rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"step_seconds": seconds, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main()
