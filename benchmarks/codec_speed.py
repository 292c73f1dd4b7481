"""How fast each codec is on this machine, how short it makes tensors, and what it loses.

python benchmarks/codec_speed.py                      all codecs, some seconds
python benchmarks/codec_speed.py --codecs int8 int4 --elements 4194304

One thread. Speeds are bytes of the fp32 tensor in a second of processor time, so other work on the machine disturbs them less;
the median of all repetitions and, in parentheses, the fastest. Errors are relative squared errors, on normal numbers, on
numbers with heavy tails (Student's t with 3 degrees of freedom) and on normal numbers with one channel in 64 thirty times as
large. "pays below" is the rate of a link under which encoding, sending and decoding one after the other take less time than
sending raw. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from atoll.compression.codec import Codec, relative_error
from atoll.compression.context import CodecContext
from atoll.compression.registry import codec, codec_names
from atoll.compression.speed import CodecSpeed, measure_speed

CHANNELS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one codec; bytes are those of fp32 tensors, errors relative squared errors."""

    name: str
    bits: float
    encode: float
    decode: float
    fastest_encode: float
    fastest_decode: float
    pays_below_mbps: float
    errors: dict[str, float]


def samples(num_elements: int) -> dict[str, Tensor]:
    """Tensors of CHANNELS columns."""
    torch.manual_seed(0)
    shape = (num_elements // CHANNELS, CHANNELS)
    outliers = torch.where(torch.arange(CHANNELS) % 64 == 7, 30.0, 1.0)
    heavy = torch.distributions.StudentT(torch.tensor(3.0)).sample(torch.Size(shape))
    return {"normal": torch.randn(shape), "heavy tails": heavy, "outliers": torch.randn(shape) * outliers}


def loss(chosen: Codec, tensor: Tensor) -> tuple[float, float]:
    """The relative squared error of a round trip of the second half, and its bits a value, after one of the first half: what a
    codec learns and ships is learned and shipped by then."""
    context = CodecContext(edge="benchmark")
    chosen.reset()
    first, second = tensor.chunk(2)
    chosen.encode(first, context)
    data = chosen.encode(second, context)
    if data is None:
        return 0.0, 8.0 * tensor.dtype.itemsize
    back = chosen.decode(data, tensor.dtype, tuple(second.shape), context)
    return relative_error(second, back) ** 2, 8 * memoryview(data).nbytes / second.numel()


def figures(name: str, tensors: dict[str, Tensor], num_elements: int, repetitions: int) -> Figures:
    """Measures one codec."""
    chosen = codec(name)
    speeds = [measure_speed(chosen, time.process_time, num_elements=num_elements, repetitions=1) for _ in range(repetitions)]
    usual = CodecSpeed(
        encode_bytes_per_second=statistics.median(speed.encode_bytes_per_second for speed in speeds),
        decode_bytes_per_second=statistics.median(speed.decode_bytes_per_second for speed in speeds),
    )
    losses = {kind: loss(chosen, tensor) for kind, tensor in tensors.items()}
    bits = losses["normal"][1]
    return Figures(
        name=name,
        bits=bits,
        encode=usual.encode_bytes_per_second,
        decode=usual.decode_bytes_per_second,
        fastest_encode=max(speed.encode_bytes_per_second for speed in speeds),
        fastest_decode=max(speed.decode_bytes_per_second for speed in speeds),
        pays_below_mbps=usual.pays_below(bits / 32) * 8 / 1e6,
        errors={kind: error for kind, (error, _) in losses.items()},
    )


def line(found: Figures) -> str:
    """One row of the table."""

    def speed(usual: float, fastest: float) -> str:
        return f"{usual / 1e9:6.2f} ({fastest / 1e9:6.2f})"

    pays = f"{found.pays_below_mbps:13,.0f}" if found.bits < 32 else f"{'':13}"
    errors = "  ".join(f"{error:11.2e}" for error in found.errors.values())
    encode, decode = speed(found.encode, found.fastest_encode), speed(found.decode, found.fastest_decode)
    return f"{found.name:13} {found.bits:6.2f}  {encode}  {decode}  {pays}  {errors}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lossy_names = [name for name in codec_names() if name not in ("raw", "packed", "fp32")]
    parser.add_argument("--codecs", nargs="+", default=lossy_names, choices=lossy_names)
    parser.add_argument("--elements", type=int, default=2**20, help="of each tensor, a multiple of 512")
    parser.add_argument("--repetitions", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.elements < CHANNELS or arguments.elements % CHANNELS or arguments.repetitions < 1:
        parser.error(f"--elements must be a multiple of {CHANNELS}, and --repetitions at least 1")
    torch.set_num_threads(1)
    tensors = samples(arguments.elements)
    titles = "  ".join(f"{kind:>11}" for kind in tensors)
    print(f"{'codec':13} {'bits':>6}  {'encode GB/s':>15}  {'decode GB/s':>15}  {'pays < Mbit/s':>13}  {titles}")
    table = [figures(name, tensors, arguments.elements, arguments.repetitions) for name in arguments.codecs]
    for found in table:
        print(line(found))
    print(json.dumps({"load": os.getloadavg()[0], "codecs": [asdict(found) for found in table]}))


if __name__ == "__main__":
    main()
