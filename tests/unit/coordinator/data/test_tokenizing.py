"""Token ids from a tokenizer file: the same as tokenizing at once, written once, in bounded memory."""

from __future__ import annotations

import errno
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from atoll.coordinator.data import tokenizing
from atoll.coordinator.data.opening import open_feed
from atoll.coordinator.data.tokenizing import tokenized
from atoll.protocol.errors import JobError, ResourceError
from atoll.protocol.ids import StepNumber
from atoll.protocol.job import load_job

LINE = "the quick brown fox jumps over the lazy dog, and naïve cafés, again and again\n"


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator([LINE], trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def text_path(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(LINE * 4000, encoding="utf-8")
    return path


def test_pieces_give_the_ids_of_the_whole(tmp_path: Path, tokenizer_path: Path, text_path: Path) -> None:
    told: list[tuple[int, int]] = []
    stream, dtype = tokenized([text_path], tokenizer_path, tmp_path / "cache", lambda done, total: told.append((done, total)))
    ids = np.frombuffer(stream.read(0, stream.size), dtype=dtype)

    assert dtype == np.uint16
    assert ids.tolist() == Tokenizer.from_file(str(tokenizer_path)).encode(text_path.read_text(encoding="utf-8")).ids
    assert told[-1] == (text_path.stat().st_size, text_path.stat().st_size)


def test_the_ids_are_written_once_until_something_changes(tmp_path: Path, tokenizer_path: Path, text_path: Path) -> None:
    cache = tmp_path / "cache"
    told: list[int] = []
    for _ in range(2):
        tokenized([text_path], tokenizer_path, cache, lambda done, total: told.append(done))
    once = len(told)
    assert [path.suffix for path in cache.iterdir()] == [".bin"]

    tokenized([text_path], tokenizer_path, cache, lambda done, total: told.append(done))
    assert len(told) == once
    text_path.write_text(LINE, encoding="utf-8")
    tokenized([text_path], tokenizer_path, cache, lambda done, total: told.append(done))
    assert len(told) == once + 1


def test_a_long_text_is_never_held(tmp_path: Path, tokenizer_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(LINE * 40_000, encoding="utf-8")
    tracemalloc.start()
    try:
        tokenized([path], tokenizer_path, tmp_path / "cache")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert path.stat().st_size > 3_000_000
    assert peak < 8_000_000


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path, tokenizer_path: Path) -> None:
    path = tmp_path / "broken.txt"
    path.write_bytes(b"ab\xff\xfecd" * 40_000 + b"\xe2\x82")

    stream, dtype = tokenized([path], tokenizer_path, tmp_path / "cache")

    assert stream.size // dtype.itemsize > 160_000


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, tokenizer_path: Path, text_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ResourceError, match=r"cannot write token ids to '.*\.bin': the disk is full; free space or use"):
        tokenized([text_path], tokenizer_path, tmp_path / "cache", refuse)
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, text_path: Path) -> None:
    with pytest.raises(JobError, match=r"^data\.tokenizer: '.*' is not a tokenizer of the tokenizers library .*json"):
        tokenized([text_path], text_path, tmp_path)


def test_a_job_with_a_tokenizer(tmp_path: Path, tokenizer_path: Path, text_path: Path) -> None:
    vocabulary = tokenizing.load_tokenizer(tokenizer_path).get_vocab_size()
    (tmp_path / "job.yaml").write_text(
        "model: {builtin: gpt, options: {layers: 1, width: 8, heads: 2, context: 16, vocabulary: VOCABULARY}}\n"
        "data: {text: text.txt, tokenizer: tokenizer.json, sequence_length: 16}\n"
        "training: {steps: 1, batch: 4, microbatch: 2}\n".replace("VOCABULARY", str(vocabulary))
    )
    feed = open_feed(load_job(tmp_path / "job.yaml"), tmp_path / "state")
    inputs = feed.batch(StepNumber(1)).microbatches[0].inputs

    assert inputs["tokens"].shape == (2, 16)
    assert inputs["tokens"][:, 1:].equal(inputs["targets"][:, :-1])
    with pytest.raises(JobError) as caught:
        open_feed(load_job(tmp_path / "job.yaml", ["model.options.vocabulary=256"]), tmp_path / "state")
    assert str(caught.value) == (
        f"model.options.vocabulary: 256 is less than the {vocabulary} token ids of data.tokenizer; raise it to {vocabulary}"
    )
