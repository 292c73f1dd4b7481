"""Samples from a folder of images with one folder a class."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from atoll.coordinator.data.feed import Unit
from atoll.protocol.errors import JobError
from atoll.protocol.ids import MicrobatchIndex
from atoll.protocol.job_model import ModelLimit

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
# Mean and deviation of the channels over ImageNet: the convention of published image models.
_MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
_DEVIATION = np.array([0.229, 0.224, 0.225], dtype=np.float32)


class ImageFolder:
    """Sample ``n`` is image ``n``, classes in the order of their names, images in the order of theirs.

    An image is scaled so that it covers a square of ``size`` pixels, cut from the middle, and normalised.
    """

    field = "data.images"
    unit = Unit.SAMPLES

    def __init__(self, folder: Path, size: int, limit: ModelLimit | None) -> None:
        self._size = size
        self._classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
        self._folder = folder
        self._names = [_image_names(folder / name) for name in self._classes]
        self._ends = list(itertools.accumulate(len(names) for names in self._names))
        if not self._ends or not self._ends[-1]:
            raise JobError(self.field, f"{str(folder)!r} has no folders with images; make one folder of images a class")
        if limit is not None and len(self._classes) > limit.value:
            wrong = limit.exceeded(len(self._classes), f"the {len(self._classes)} folders of data.images")
            raise JobError(wrong.field, wrong.message)

    @property
    def num_samples(self) -> int:
        return self._ends[-1]

    @property
    def varying_dimensions(self) -> Mapping[str, tuple[int, ...]]:
        return {"images": (), "labels": ()}

    def inputs(self, sample_ids: Sequence[int], microbatch: MicrobatchIndex) -> dict[str, torch.Tensor]:
        labels = [bisect.bisect_right(self._ends, number) for number in sample_ids]
        images = np.stack([self._image(number, label) for number, label in zip(sample_ids, labels, strict=True)])
        return {"images": torch.from_numpy(images), "labels": torch.tensor(labels, dtype=torch.int64)}

    def _image(self, number: int, label: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        names = self._names[label]
        path = self._folder / self._classes[label] / names[number - (self._ends[label] - len(names))]
        try:
            with Image.open(path) as image:
                square = ImageOps.fit(image.convert("RGB"), (self._size, self._size), Image.Resampling.BILINEAR)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise JobError(self.field, f"{str(path)!r} cannot be read as an image ({error}); mend or remove it") from error
        pixels = np.asarray(square, dtype=np.float32) / np.float32(255)
        return np.ascontiguousarray(((pixels - _MEAN) / _DEVIATION).transpose(2, 0, 1))


def _image_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(_SUFFIXES) and entry.is_file())
