"""What codecs do to the training of a byte-level GPT, or of a ResNet, that is cut into stages.

python benchmarks/codec_quality.py --results codecs.json               some pairs of codecs, some minutes each
python benchmarks/codec_quality.py --codecs raw:raw transform:transform-1.5 --steps 60 --seeds 0 1
python benchmarks/codec_quality.py --model resnet --layers 101 --context 16 --sequences 8 --steps 100 --codecs raw:raw auto@8
python benchmarks/codec_quality.py --results codecs.json --figures DIR  curves of what has been measured, as SVG

In one process, every tensor that would cross from a stage to the next is encoded and decoded. A pair names the codec of
activations and that of gradients; with ``auto@8`` the policy of a run chooses them, as over links of 8 Mbps. The text is
Python's standard library, images are drawn digits. For each pair and seed: bits a value each way, bases included, and relative
squared errors, each over the first and the last fifth of the steps, and the loss on text kept aside, without codecs. sparse-300
is AdaTopK with r = 100 where all links are equally slow. Weights, batches and their order are the same for all pairs.
Repetitions with other seeds differ by a few hundredths in loss, so smaller differences between single runs mean nothing. One
thread; the last line is JSON.

With --results each run is kept in that file when it ends, and one that is there is not made again: stop it when you like, and
start it again with the same words. Seeds come last: all pairs with the first one, then all with the second.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from codec_curves import draw
from cut_subjects import open_data
from cut_training import Outcome, Training, train

PAIRS = (
    "raw:raw",
    "int8:int8",
    "int4:int4",
    "transform:transform",
    "auto@8",
    "auto@1",
    "topk-10:topk-10",
    "topk-1:topk-1",
    "sparse-300:sparse-300",
)


class Results:
    """What has been measured with one kind of training, in a file or in memory alone."""

    def __init__(self, path: Path | None, training: Training) -> None:
        self._path = path
        self._training = training
        self.runs: list[Outcome] = []
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["training"] != asdict(training):
                raise SystemExit(f"{path} holds runs of another training, {kept['training']}: name another file")
            self.runs = [Outcome(**run) for run in kept["runs"]]

    def find(self, pair: str, seed: int) -> Outcome | None:
        return next((run for run in self.runs if (run.pair, run.seed) == (pair, seed)), None)

    def add(self, run: Outcome) -> None:
        """Keeps it; whenever this is interrupted the file is whole."""
        self.runs.append(run)
        if self._path is not None:
            written = self._path.with_suffix(".new")
            written.write_text(json.dumps(self.to_json(self.runs)))
            written.replace(self._path)

    def to_json(self, runs: list[Outcome]) -> dict[str, Any]:
        return {"load": os.getloadavg()[0], "training": asdict(self._training), "runs": [asdict(run) for run in runs]}


def line(found: Outcome) -> str:
    """One row of the table."""
    bits = "  ".join(f"{found.bits[key]:6.2f}" for key in found.bits)
    errors = "  ".join(f"{found.errors[key]:9.1e}" for key in found.errors)
    return f"{found.pair:32} {found.seed:4}  {bits}   {errors}   {found.validation:8.4f}  {found.seconds:7.0f}"


def print_titles() -> None:
    """The head of the table."""
    titles = f"{'bits forward':>14}  {'bits backward':>14}   {'error forward':>20}  {'error backward':>20}  loss, raw  seconds"
    print(f"{'forward:backward':32} seed  {titles}")
    print(f"{'':37}   early    late   early    late       early       late      early       late")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Flags for the training."""
    for name, default in (("steps", 400), ("width", 192), ("layers", 8), ("stages", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("context", 128), ("microbatches", 4), ("sequences", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--model", choices=("gpt", "resnet"), default="gpt")


def main() -> None:
    """Prints the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=list(PAIRS), metavar="FORWARD:BACKWARD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--results", type=Path, help="keep runs in this file, and make none again that is in it")
    parser.add_argument("--figures", type=Path, help="draw the curves of all runs in the results into this folder, and end")
    add_sizes(parser)
    arguments = vars(parser.parse_args())
    pairs, seeds, path, figures = (arguments.pop(name) for name in ("codecs", "seeds", "results", "figures"))
    training = Training(**arguments)
    results = Results(path, training)
    if figures is not None:
        draw(training, results.runs, figures)
        return
    torch.set_num_threads(1)
    data, runs = open_data(training.model, training.context), []
    print_titles()
    for seed in seeds:
        for pair in pairs:
            run = results.find(pair, seed)
            if run is None:
                run = train(training, pair, seed, data)
                results.add(run)
            runs.append(run)
            print(line(run), flush=True)
    print(json.dumps(results.to_json(runs)))


if __name__ == "__main__":
    main()
