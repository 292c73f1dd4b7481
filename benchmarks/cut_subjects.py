"""What is trained in stages and on what: a byte-level GPT on Python's standard library, or a ResNet on drawn digits.

No data are fetched: the text lies beside the interpreter, and digits are drawn in the typefaces that matplotlib brings, each
one in a size, place, slant and pair of colours of its own, light on dark, with noise over all.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from atoll.coordinator.models.gpt import GPT
from atoll.coordinator.models.resnet import ResNet

DIGITS = 10
DRAWN = 4000
NOISE = 0.1
SLANT_DEGREES = 12
TYPEFACES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic")


class Data(Protocol):
    """Inputs and targets; of those kept ``aside`` none is trained on."""

    def batch(self, samples: int, generator: torch.Generator, *, aside: bool = False) -> tuple[Tensor, Tensor]: ...


class Text:
    """Bytes of Python's standard library, the last twentieth kept aside."""

    def __init__(self, context: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._bytes = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
        self._context = context
        self._edge = len(self._bytes) * 19 // 20

    def batch(self, samples: int, generator: torch.Generator, *, aside: bool = False) -> tuple[Tensor, Tensor]:
        """Tokens and targets."""
        low, high = (self._edge, len(self._bytes)) if aside else (0, self._edge)
        starts = torch.randint(low, high - self._context - 1, (samples, 1), generator=generator)
        rows = self._bytes[starts + torch.arange(self._context + 1)]
        return rows[:, :-1], rows[:, 1:]


class Digits:
    """Images of ``side`` times ``side`` and what they show, the last fifth kept aside. The same for all runs."""

    def __init__(self, side: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self._labels = torch.randint(DIGITS, (DRAWN,), generator=generator)
        images = torch.stack([_drawn(int(label), side, generator) for label in self._labels])
        self._images = images + NOISE * torch.randn(images.shape, generator=generator)
        self._edge = DRAWN * 4 // 5

    def batch(self, samples: int, generator: torch.Generator, *, aside: bool = False) -> tuple[Tensor, Tensor]:
        """Images and digits."""
        low, high = (self._edge, DRAWN) if aside else (0, self._edge)
        places = torch.randint(low, high, (samples,), generator=generator)
        return self._images[places], self._labels[places]


def _drawn(digit: int, side: int, generator: torch.Generator) -> Tensor:
    """[3, side, side], each value between -1 and 1."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    path = Path(get_data_path()) / "fonts" / "ttf" / f"{TYPEFACES[number(0, len(TYPEFACES))]}.ttf"
    paper, ink = ((number(low, low + 96), number(low, low + 96), number(low, low + 96)) for low in (0, 160))
    mask = Image.new("L", (4 * side, 4 * side))  # drawn large, so that edges are smooth
    font = ImageFont.truetype(path, number(5 * side // 2, 7 * side // 2))
    place = 2 * side + number(-side // 3, side // 3 + 1), 2 * side + number(-side // 3, side // 3 + 1)
    ImageDraw.Draw(mask).text(place, str(digit), fill=255, font=font, anchor="mm")
    mask = mask.rotate(number(-SLANT_DEGREES, SLANT_DEGREES + 1)).resize((side, side), Image.Resampling.BOX)
    image = Image.composite(Image.new("RGB", (side, side), ink), Image.new("RGB", (side, side), paper), mask)
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(side, side, 3)
    return values.permute(2, 0, 1) / 127.5 - 1.0


def open_data(model: str, size: int) -> Data:
    """For sequences of ``size`` bytes, or images of so many pixels a side."""
    return Digits(size) if model == "resnet" else Text(size)


def make_network(model: str, *, layers: int, width: int, size: int) -> nn.Module:
    """A module that gives the mean loss of a batch. Of a ResNet ``layers`` is the depth by its name, and ``width`` its own."""
    if model == "resnet":
        return ResNet(depth=layers, classes=DIGITS)
    return GPT(layers=layers, width=width, heads=4, context=size, tied=False)


def blocks_of(network: nn.Module) -> Sequence[nn.Module]:
    """Between which it may be cut, in order. Those of a ResNet compute about the same each."""
    if isinstance(network, ResNet):
        return [block for stage in network.stages.children() for block in stage.children()]
    assert isinstance(network, GPT)
    return list(network.blocks)
