"""Rows of NumPy files and images of folders, read where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.coordinator.data.arrays import ArraySamples
from atoll.coordinator.data.feed import Unit
from atoll.coordinator.data.images import ImageFolder
from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.data.random import RandomImages, RandomTokens
from atoll.coordinator.data.tokens import TokenWindows, token_file
from atoll.protocol.errors import JobError
from atoll.protocol.ids import MicrobatchIndex, StepNumber
from atoll.protocol.job import load_job
from atoll.protocol.job_data import RandomData
from atoll.protocol.job_model import ModelLimit

FIRST = MicrobatchIndex(0)
NAMES = ("images", "labels")


def _classes(count: int) -> ModelLimit:
    return ModelLimit(field="model.options.classes", setting="classes", value=count)


def _save(folder: Path, **arrays: np.ndarray[Any, Any]) -> dict[str, Path]:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {name: folder / f"{name}.npy" for name in arrays}


def test_rows_of_arrays_become_what_models_take(tmp_path: Path) -> None:
    images = np.arange(5 * 3 * 2 * 2, dtype=np.uint8).reshape(5, 3, 2, 2)
    paths = _save(
        tmp_path, images=images, labels=np.arange(5, dtype=np.int32), extra=np.ones((5, 2)), flags=np.ones(5, dtype=bool)
    )
    samples = ArraySamples(paths, (), {})
    inputs = samples.inputs([4, 0], FIRST)

    assert samples.unit is Unit.SAMPLES
    assert torch.equal(inputs["images"], torch.from_numpy(images[[4, 0]].astype(np.float32) / 255))
    assert inputs["labels"].tolist() == [4, 0]
    assert inputs["labels"].dtype == torch.int64
    assert inputs["extra"].dtype == torch.float32
    assert inputs["flags"].dtype == torch.bool


def test_an_npz_file_is_read_by_row(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((6, 3, 4, 4), dtype=np.float32)
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(6))
    inputs = ArraySamples(tmp_path / "set.npz", NAMES, {"labels": _classes(6)}).inputs([5, 2], FIRST)

    assert torch.equal(inputs["images"], torch.from_numpy(images[[5, 2]]))
    assert inputs["labels"].tolist() == [5, 2]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (np.arange(3), "data.arrays.labels: it has 3 rows, but images has 4; give one row a sample"),
        (np.array([object()] * 4), "data.arrays.labels: its dtype object holds no numbers; give an array of numbers"),
        (np.array(3), "data.arrays.labels: it is a single number; give an array with one row a sample"),
        (np.asfortranarray(np.ones((4, 2))), "data.arrays.labels: its rows are scattered (Fortran order); save numpy.asc"),
    ],
)
def test_arrays_that_do_not_suit_are_refused(tmp_path: Path, labels: np.ndarray[Any, Any], sentence: str) -> None:
    with pytest.raises(JobError) as caught:
        ArraySamples(_save(tmp_path, images=np.ones((4, 2)), labels=labels), NAMES, {})
    assert str(caught.value).startswith(sentence)


def test_other_files_and_names_are_refused(tmp_path: Path) -> None:
    paths = _save(tmp_path, x=np.ones(4), y=np.ones(4))
    with pytest.raises(JobError, match=r"^data\.arrays: the arrays are x, y; the model wants images and labels$"):
        ArraySamples(paths, NAMES, {})
    np.savez_compressed(tmp_path / "small.npz", images=np.ones(4))
    with pytest.raises(JobError, match=r"^data\.arrays\.images: it is compressed in 'small\.npz'; write it with numpy\.savez"):
        ArraySamples(tmp_path / "small.npz", (), {})
    with pytest.raises(JobError, match=r"^data\.arrays: 'x\.npy' is not an \.npz file; make one with numpy\.savez$"):
        ArraySamples(paths["x"], (), {})
    (tmp_path / "z.npy").write_bytes(b"nothing")
    with pytest.raises(JobError, match=r"^data\.arrays\.z: 'z\.npy' is not an \.npy file; make one with numpy\.save$"):
        ArraySamples({"z": tmp_path / "z.npy"}, (), {})


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    samples = ArraySamples(
        _save(tmp_path, images=np.ones((4, 2)), labels=np.array([0, 1, 2, -1])), NAMES, {"labels": _classes(2)}
    )

    samples.inputs([0, 1], FIRST)
    with pytest.raises(JobError, match=r"^data\.arrays\.labels: 2 is not below classes 2 of model\.options\.classes; corr"):
        samples.inputs([2], FIRST)
    with pytest.raises(JobError, match=r"^data\.arrays\.labels: -1 is not below"):
        samples.inputs([3], FIRST)


def test_token_files(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(40, dtype=np.int32))
    (tmp_path / "ids.bin").write_bytes(np.arange(40, dtype="<u2").tobytes())
    for name in ("ids.npy", "ids.bin"):
        ids, dtype = token_file(tmp_path / name)
        inputs = TokenWindows(ids, dtype, 9, field="data.tokens", vocabulary=None).inputs([3, 1], FIRST)
        assert inputs["tokens"].tolist() == [list(range(30, 39)), list(range(10, 19))]
        assert inputs["targets"].tolist() == [list(range(31, 40)), list(range(11, 20))]
    np.save(tmp_path / "square.npy", np.ones((2, 2)))
    with pytest.raises(
        JobError, match=r"^data\.tokens: 'square\.npy' is float64 of shape \[2, 2\]; token ids are whole numbers"
    ):
        token_file(tmp_path / "square.npy")
    with pytest.raises(JobError, match=r"^data\.tokens: 'ids\.txt' is neither \.npy nor \.bin"):
        token_file(tmp_path / "ids.txt")


def _picture(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (8, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def test_an_image_folder(tmp_path: Path) -> None:
    _picture(tmp_path / "cats" / "b.png", (255, 0, 0))
    _picture(tmp_path / "cats" / "a.jpg", (0, 0, 0))
    _picture(tmp_path / "dogs" / "c.png", (255, 255, 255), (3, 9))
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    samples = ImageFolder(tmp_path, 4, _classes(2))
    inputs = samples.inputs([2, 0, 1], FIRST)

    assert samples.num_samples == 3
    assert inputs["labels"].tolist() == [1, 0, 0]
    assert inputs["images"].shape == (3, 3, 4, 4)
    assert inputs["images"].dtype == torch.float32
    assert torch.allclose(
        inputs["images"][0, :, 0, 0], torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225])
    )
    assert torch.allclose(inputs["images"][2, :, 3, 3], torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]))


def test_image_folders_that_do_not_suit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"^data\.images: '.*' has no folders with images; make one folder of images a class$"):
        ImageFolder(tmp_path, 4, None)
    _picture(tmp_path / "cats" / "a.png", (0, 0, 0))
    (tmp_path / "dogs").mkdir()
    (tmp_path / "dogs" / "broken.png").write_bytes(b"no image")
    with pytest.raises(
        JobError, match=r"^model\.options\.classes: 1 is less than the 2 folders of data\.images; raise it to 2$"
    ):
        ImageFolder(tmp_path, 4, _classes(1))
    with pytest.raises(JobError, match=r"^data\.images: '.*broken\.png' cannot be read as an image"):
        ImageFolder(tmp_path, 4, None).inputs([1], FIRST)


def test_random_tokens_follow_the_lengths() -> None:
    samples = RandomTokens(RandomData(vocabulary=7, lengths=(6, 12, 3)), 256, seed=1)
    shapes = [tuple(samples.inputs([5, 9], MicrobatchIndex(index))["tokens"].shape) for index in range(4)]

    assert shapes == [(2, 6), (2, 12), (2, 3), (2, 6)]
    assert samples.varying_dimensions == {"tokens": (1,), "targets": (1,)}
    inputs = samples.inputs([5], FIRST)
    assert inputs["tokens"][:, 1:].equal(inputs["targets"][:, :-1])
    assert 0 <= int(inputs["tokens"].min()) <= int(inputs["tokens"].max()) < 7
    assert RandomTokens(RandomData(vocabulary=7), 256, seed=1).varying_dimensions == {"tokens": (), "targets": ()}


def test_random_samples_depend_on_seed_and_number_alone() -> None:
    for one, same, other in (
        [RandomTokens(RandomData(), 8, seed) for seed in (1, 1, 2)],
        [RandomImages(RandomData(kind="images"), 8, seed) for seed in (1, 1, 2)],
    ):
        first = one.inputs([3, 4], FIRST)
        name = next(iter(first))
        assert first[name].equal(same.inputs([3, 4], MicrobatchIndex(1))[name])
        assert not first[name].equal(other.inputs([3, 4], FIRST)[name])
        assert not first[name][0].equal(first[name][1])


def test_jobs_of_each_kind_open(tmp_path: Path) -> None:
    _picture(tmp_path / "pictures" / "cats" / "a.png", (0, 0, 0))
    _picture(tmp_path / "pictures" / "dogs" / "b.png", (0, 0, 0))
    _save(tmp_path, images=np.ones((4, 3, 8, 8)), labels=np.zeros(4, dtype=int))
    resnet = "{builtin: resnet, options: {classes: 2}}"
    gpt = "{builtin: gpt, options: {layers: 1, width: 8, heads: 2, context: 8}}"
    np.save(tmp_path / "ids.npy", np.arange(100))
    for model, data, names in (
        (resnet, "{images: pictures, image_size: 8}", {"images", "labels"}),
        (resnet, "{arrays: {images: images.npy, labels: labels.npy}}", {"images", "labels"}),
        (resnet, "{random: {kind: images, classes: 2}, image_size: 8}", {"images", "labels"}),
        (gpt, "{random: tokens, sequence_length: 8}", {"tokens", "targets"}),
        (gpt, "{tokens: ids.npy, sequence_length: 8}", {"tokens", "targets"}),
    ):
        (tmp_path / "job.yaml").write_text(f"model: {model}\ndata: {data}\ntraining: {{steps: 1, batch: 2, microbatch: 2}}\n")
        feed = open_feed(load_job(tmp_path / "job.yaml"), tmp_path)
        assert set(feed.example_inputs()) == names
        assert len(feed.batch(StepNumber(1)).sample_ids) == 2
