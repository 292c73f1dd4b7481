"""Text as bytes: which files, and windows of them in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import psutil
import pytest

from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.data.text import ByteStream, Section, text_files, whole_files
from atoll.coordinator.data.tokens import TokenWindows
from atoll.protocol.errors import JobError, ResourceError
from atoll.protocol.ids import MicrobatchIndex, StepNumber
from atoll.protocol.job import Job, load_job
from atoll.protocol.job_model import ModelLimit

JOB = """
model: {builtin: gpt, options: {layers: 1, width: 8, heads: 2, context: 16}}
data: {text: texts, sequence_length: 8, validation: 0.2}
training: {steps: 5, batch: 4, microbatch: 2, evaluate_every: 1}
"""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "z.txt").write_bytes(bytes(range(100, 200)))
    (folder / "b" / "a.txt").write_bytes(bytes(range(100)))
    (folder / "b" / "empty.txt").write_bytes(b"")
    (folder / ".hidden" / "x.txt").write_bytes(b"hidden")
    return folder


def _job(tmp_path: Path, *overrides: str) -> Job:
    (tmp_path / "job.yaml").write_text(JOB)
    return load_job(tmp_path / "job.yaml", overrides)


def test_files_of_a_folder_come_in_the_order_of_their_paths(texts: Path) -> None:
    names = [path.relative_to(texts).as_posix() for path in text_files(str(texts))]

    assert names == ["b/a.txt", "b/empty.txt", "z.txt"]
    assert text_files(str(texts / "**" / "*.txt")) == [texts / "b/a.txt", texts / "b/empty.txt", texts / "z.txt"]
    assert text_files(str(texts / "z.txt")) == [texts / "z.txt"]


def test_the_standard_library_is_found_without_installed_packages() -> None:
    files = text_files("stdlib")

    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)
    assert whole_files(files).size > 5_000_000


def test_no_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"^data\.text: '.*\*\.md' holds no files; write stdlib"):
        text_files(str(tmp_path / "*.md"))


def test_a_stream_reads_across_files(texts: Path) -> None:
    stream = whole_files(text_files(str(texts)))

    assert stream.size == 200
    assert stream.read(95, 10) == bytes(range(95, 105))
    assert stream.read(0, 200) == bytes(range(200))
    assert stream.read(100, 1) == b"d"


def test_sections_of_a_file(texts: Path) -> None:
    stream = ByteStream([Section(path=texts / "z.txt", offset=10, size=5), Section(path=texts / "z.txt", offset=50, size=5)])

    assert list(stream.read(3, 4)) == [113, 114, 150, 151]


def test_a_file_that_shrinks_or_vanishes_is_reported(texts: Path) -> None:
    stream = whole_files(text_files(str(texts)))
    (texts / "z.txt").write_bytes(b"short")
    with pytest.raises(ResourceError, match="became shorter during the run"):
        stream.read(150, 10)
    (texts / "z.txt").unlink()
    with pytest.raises(ResourceError, match="No such file or directory; put it back"):
        stream.read(150, 10)


def test_targets_are_the_next_bytes(tmp_path: Path, texts: Path) -> None:
    feed = open_feed(_job(tmp_path), tmp_path)
    batch = feed.batch(StepNumber(1))

    assert batch.num_tokens == 4 * 8
    for microbatch in batch.microbatches:
        tokens, targets = microbatch.inputs["tokens"], microbatch.inputs["targets"]
        assert tokens.shape == targets.shape == (2, 8)
        assert (targets == tokens + 1).all()
        assert microbatch.weight == 16
        assert [row[0].item() for row in tokens] == [9 * number for number in microbatch.sample_ids]


def test_no_byte_is_both_trained_on_and_evaluated(tmp_path: Path, texts: Path) -> None:
    feed = open_feed(_job(tmp_path), tmp_path)
    trained, evaluated = set(), set()
    for step in range(1, 12):
        for microbatch in feed.batch(StepNumber(step)).microbatches:
            trained |= {value.item() for name in ("tokens", "targets") for value in microbatch.inputs[name].flatten()}
    for microbatch in feed.validation():
        evaluated |= {value.item() for name in ("tokens", "targets") for value in microbatch.inputs[name].flatten()}

    assert len(evaluated) == 4 * 9
    assert trained.isdisjoint(evaluated)


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"12345678")
    with pytest.raises(JobError) as caught:
        open_feed(_job(tmp_path, "data.text=short.txt"), tmp_path)
    assert str(caught.value) == "data.text: it holds 8 tokens, fewer than a sample (9); give more or lower data.sequence_length"


def test_ten_gigabytes_of_text_take_no_memory(tmp_path: Path) -> None:
    """A sparse file reads as zeros; what matters is its length. Samples are taken from all over it."""
    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        file.truncate(10 << 30)
        file.seek(-1, 2)
    feed = open_feed(_job(tmp_path, "data.text=large.txt"), tmp_path)
    feed.batch(StepNumber(1))
    resident = psutil.Process().memory_info().rss
    tracemalloc.start()
    try:
        farthest = 0
        for step in range(2, 102):
            farthest = max(farthest, *feed.batch(StepNumber(step)).sample_ids)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert feed.num_training_samples > 900_000_000
    assert farthest > 900_000_000
    assert peak < 1 << 20
    assert psutil.Process().memory_info().rss - resident < 32 << 20


def test_ids_out_of_range_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ids.bin").write_bytes(np.arange(90, dtype="<u2").tobytes())
    limit = ModelLimit(field="model.options.vocabulary", setting="vocabulary", value=50)
    windows = TokenWindows(whole_files([tmp_path / "ids.bin"]), np.dtype("<u2"), 8, field="data.tokens", vocabulary=limit)

    windows.inputs([0], MicrobatchIndex(0))
    with pytest.raises(JobError) as caught:
        windows.inputs([0, 9], MicrobatchIndex(0))
    assert str(caught.value) == "data.tokens: token id 89 is not below vocabulary 50 of model.options.vocabulary; raise that"
