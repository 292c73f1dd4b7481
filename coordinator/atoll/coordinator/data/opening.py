"""From a job's data section to its :class:`Feed`; what the data and the model must agree on is checked here once it is open."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from atoll.coordinator.data.arrays import ArraySamples
from atoll.coordinator.data.feed import Feed, FeedSettings, Samples
from atoll.coordinator.data.images import ImageFolder
from atoll.coordinator.data.random import RandomImages, RandomTokens
from atoll.coordinator.data.text import text_files, whole_files
from atoll.coordinator.data.tokenizing import Progress, load_tokenizer, tokenized
from atoll.coordinator.data.tokens import TokenWindows, token_file
from atoll.protocol.errors import JobError
from atoll.protocol.job import Job


def open_feed(job: Job, cache: Path, progress: Progress | None = None) -> Feed:
    """The feed of ``job``. Tokenized text is kept in the folder ``cache``; ``progress`` is told while that is made.

    Raises JobError when the data does not suit the job, ResourceError when the cache cannot be written.
    """
    settings = FeedSettings(
        seed=job.training.seed,
        batch=job.training.batch,
        microbatch=job.training.microbatch_samples,
        validation=job.data.validation,
        evaluation_batches=job.training.evaluation_batches,
    )
    return Feed(_open_samples(job, cache, progress), settings)


def _open_samples(job: Job, cache: Path, progress: Progress | None) -> Samples:
    data, vocabulary, classes = job.data, job.model.limit("vocabulary"), job.model.limit("classes")
    if data.text is not None:
        return _open_text(job, cache, progress)
    if data.tokens is not None:
        ids, dtype = token_file(data.tokens)
        return TokenWindows(ids, dtype, data.sequence_length, field="data.tokens", vocabulary=vocabulary)
    if data.images is not None:
        return ImageFolder(data.images, data.image_size, classes)
    if data.arrays is not None:
        return ArraySamples(data.arrays, _expected_names(job), {"tokens": vocabulary, "targets": vocabulary, "labels": classes})
    assert data.random is not None, "the job file allows exactly one kind of data"
    if data.random.kind == "images":
        return RandomImages(data.random, data.image_size, job.training.seed)
    return RandomTokens(data.random, data.sequence_length, job.training.seed)


def _open_text(job: Job, cache: Path, progress: Progress | None) -> Samples:
    data, limit = job.data, job.model.limit("vocabulary")
    assert data.text is not None
    files = text_files(data.text)
    if data.tokenizer == "bytes":
        return TokenWindows(whole_files(files), np.dtype(np.uint8), data.sequence_length, field="data.text", vocabulary=None)
    count = load_tokenizer(Path(data.tokenizer)).get_vocab_size()
    if limit is not None and count > limit.value:
        wrong = limit.exceeded(count, f"the {count} token ids of data.tokenizer")
        raise JobError(wrong.field, wrong.message)
    ids, dtype = tokenized(files, Path(data.tokenizer), cache, progress)
    return TokenWindows(ids, dtype, data.sequence_length, field="data.text", vocabulary=None)


def _expected_names(job: Job) -> tuple[str, ...]:
    return {"tokens": ("tokens", "targets"), "images": ("images", "labels"), None: ()}[job.model.input_kind]
