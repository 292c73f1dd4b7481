"""What local steps do to the training of a byte-level GPT: replicas that average once in H steps, beside averaging after each.

    python benchmarks/local_steps.py [--every 1 10 50] [--replicas 2] [--steps 600] [--seeds 0] [--warm-up 0.25] [--keep]

In one process. Each replica trains on sequences of its own; with H = 1 gradients are averaged after each step, otherwise
the changes of weights after H, by the outer step (0.7 and Nesterov 0.9 unless flags say otherwise), after which the inner
optimizers begin anew, as a run's do, or keep their moments. Before that they average gradients for a part of the steps
(``--warm-up``), as a run does whose weights another one then starts from. All see the same
tokens: steps x replicas x sequences. The text is Python's standard library; the loss is that on text kept aside. Bytes are
what a replica brings to averaging, by fp32, a step. One thread; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from torch import Tensor, nn

from cut_subjects import Data, open_data
from cut_training import Training
from outer_step import LocalSteps, OuterOptimizer, mean_change


class Replica:
    """One that trains on its own between rounds."""

    def __init__(self, training: Training, seed: int, place: int) -> None:
        torch.manual_seed(seed)
        self.network = training.network()
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._training = training
        self._generator = torch.Generator().manual_seed(1000 * seed + place)

    def backward(self, data: Data, step: int) -> None:
        """The gradients of one step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._training.rate(step)
        self.optimizer.zero_grad()
        self.network(*data.batch(self._training.sequences, self._generator)).backward()

    def update(self) -> None:
        """The step itself."""
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.network.named_parameters())

    def put(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(weights[name])


def validation(network: nn.Module, data: Data, training: Training) -> float:
    """The loss on text kept aside, on the same batches for all."""
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        losses = [float(network(*data.batch(training.sequences, generator, aside=True))) for _ in range(training.validation)]
    return sum(losses) / len(losses)


def average_gradients(replicas: list[Replica]) -> None:
    """What replicas do that average after each step."""
    for parameters in zip(*(replica.network.parameters() for replica in replicas), strict=True):
        mean = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None]).mean(0)
        for parameter in parameters:
            parameter.grad = mean.clone()


def run(
    training: Training, data: Data, *, settings: LocalSteps, count: int, seed: int, warm_up: float, keep: bool
) -> dict[str, float]:
    """One training, to its loss; ``warm_up`` is the part of its steps that average gradients."""
    began = time.thread_time()
    replicas = [Replica(training, seed, place) for place in range(count)]
    every, first = settings.every, int(warm_up * training.steps)
    for step in range(training.steps):
        if step == first:
            outer = OuterOptimizer(settings, replicas[0].weights())
        for replica in replicas:
            replica.backward(data, step)
        if every == 1 or step < first:
            average_gradients(replicas)
        for replica in replicas:
            replica.update()
        if every > 1 and step >= first and (settings.is_outer(step + 1 - first) or step + 1 == training.steps):
            mean = mean_change([outer.change(replica.weights()) for replica in replicas], [1] * count)
            weights = outer.step(mean)
            for replica in replicas:
                replica.put(weights)
                if not keep:
                    replica.optimizer.state.clear()
    size = sum(parameter.numel() for parameter in replicas[0].network.parameters())
    return {
        "every": every,
        "seed": seed,
        "validation": validation(replicas[0].network, data, training),
        "bytes_per_step": 4 * size / every,
        "seconds": time.thread_time() - began,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=0.7, help="of the outer step; 1 without momentum averages weights")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer step")
    parser.add_argument("--warm-up", type=float, default=0.0, help="part of the steps that average gradients, at first")
    parser.add_argument("--keep", action="store_true", help="inner optimizers keep their moments")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8, help="of a replica, a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(
        steps=options.steps,
        width=options.width,
        layers=options.layers,
        stages=1,
        context=options.context,
        microbatches=1,
        sequences=options.sequences,
    )
    data = open_data("gpt", options.context)
    found = []
    print(f"{'H':>4} {'seed':>4} {'loss':>8} {'against H=1':>12} {'bytes a step':>14}")
    for seed in options.seeds:
        for every in options.every:
            settings = LocalSteps(every=every, learning_rate=options.rate, momentum=options.momentum)
            row = run(
                training,
                data,
                settings=settings,
                count=options.replicas,
                seed=seed,
                warm_up=options.warm_up,
                keep=options.keep,
            )
            found.append(row)
            base = next((one["validation"] for one in found if one["every"] == 1 and one["seed"] == seed), float("nan"))
            against = row["validation"] / base - 1
            print(f"{every:4} {seed:4} {row['validation']:8.4f} {against:+12.1%} {row['bytes_per_step']:14.0f}", flush=True)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
