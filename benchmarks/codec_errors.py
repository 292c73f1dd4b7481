"""What each codec loses of tensors that really cross between stages, early and late in a training that no codec disturbs.

python benchmarks/codec_errors.py                     the model of codec_quality.py, some minutes
python benchmarks/codec_errors.py --steps 100 --codecs int8 int4 transform

The training of codec_quality.py with raw boundaries; every tensor of two stretches of steps is shown to all codecs, each with
links of its own, and encoded and decoded. Early are the steps from the 10th on, late the last ones; a stretch has twenty steps,
of which codecs with state learn from the first ten, and the others are counted. Relative squared errors and bits a value, means
over boundaries and microbatches. One thread; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict

import torch
from torch import Tensor

from atoll.compression.codec import error_and_norm
from atoll.compression.context import Direction, direction
from atoll.compression.registry import MessageCoder
from atoll.protocol.messages import Message, MessageKey
from codec_quality import add_sizes
from cut_model import Totals
from cut_subjects import open_data
from cut_training import FIFTHS, Training, train

CODECS = (
    "bf16",
    "int8",
    "int4",
    "int3",
    "int2",
    "transform",
    "transform-1.75",
    "transform-1.5",
    "transform-1",
    "transform-0.7",
    "transform-0.5",
    "topk-10",
    "topk-1",
    "sparse-300",
)
FIRST_EARLY = 10
STRETCH = 20
LEARNING = 10


class Shadow:
    """One codec beside a training, with both ends of each boundary's links anew for each stretch."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ends: dict[tuple[str, int], tuple[MessageCoder, MessageCoder]] = {}
        self.totals: dict[tuple[Direction, str], Totals] = {}

    def see(self, stretch: str, number: int, key: MessageKey, edge: str, tensor: Tensor, *, counts: bool) -> None:
        """A tensor crosses boundary ``number``."""
        way = direction(key.kind)
        ends = self._ends.setdefault((stretch, number), (MessageCoder(), MessageCoder()))
        sender, receiver = ends if way is Direction.FORWARD else ends[::-1]
        encoded = sender.encode(Message(key=key, tensors=((edge, tensor),)), self._name)
        error, norm = error_and_norm(tensor, receiver.decode(encoded).tensor(edge))
        if not counts:
            return
        totals = self.totals.setdefault((way, stretch), Totals())
        totals.values += tensor.numel()
        totals.num_bytes += encoded.num_bytes
        totals.squared_error += (error / norm) ** 2 if norm else 0.0
        totals.tensors += 1


class Watcher:
    """Shows the tensors of both stretches to all shadows."""

    def __init__(self, names: list[str], steps: int) -> None:
        self.shadows = {name: Shadow(name) for name in names}
        self._starts = {"early": min(FIRST_EARLY, max(0, steps - STRETCH)), "late": max(0, steps - STRETCH)}

    def __call__(self, number: int, key: MessageKey, edge: str, tensor: Tensor) -> None:
        for stretch, start in self._starts.items():
            if start <= key.step < start + STRETCH:
                for shadow in self.shadows.values():
                    shadow.see(stretch, number, key, edge, tensor, counts=key.step >= start + LEARNING)


def line(name: str, shadow: Shadow) -> str:
    """One row of the table."""
    found = [shadow.totals[way, stretch] for way in Direction for stretch in FIFTHS]
    return f"{name:14}" + "".join(f"{one.bits:8.2f} {one.error:10.2e}" for one in found)


def main() -> None:
    """Trains once and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), metavar="CODEC")
    parser.add_argument("--seed", type=int, default=0)
    add_sizes(parser)
    arguments = vars(parser.parse_args())
    names, seed = arguments.pop("codecs"), arguments.pop("seed")
    training = Training(**arguments)
    torch.set_num_threads(1)
    watcher = Watcher(names, training.steps)
    train(training, "raw:raw", seed, open_data(training.model, training.context), watcher)
    print(f"{'':14}" + "".join(f"{way + ' ' + stretch:>19}" for way in Direction for stretch in FIFTHS))
    print(f"{'codec':14}" + 4 * f"{'bits':>8} {'error':>10}")
    for name, shadow in watcher.shadows.items():
        print(line(name, shadow))
    codecs = {
        name: {
            f"{way} {stretch}": {"bits": found.bits, "error": found.error} for (way, stretch), found in shadow.totals.items()
        }
        for name, shadow in watcher.shadows.items()
    }
    print(json.dumps({"load": os.getloadavg()[0], "training": asdict(training), "seed": seed, "codecs": codecs}))


if __name__ == "__main__":
    main()
