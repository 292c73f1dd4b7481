"""Whatever another process or a person sends: an error of the project's, or nothing; never a crash, never a hang.

A short run over every decoder; ``tests/system/test_fuzzing.py`` has the long one. What that finds is kept here.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.compression.bases import Bases
from atoll.compression.symbols import SymbolCoder
from atoll.protocol.errors import JobError, WireError
from atoll.protocol.job import parse_job
from atoll.protocol.job_text import apply_overrides, parse_job_text
from support.fuzzing.target import LARGEST_INPUT, Target, mutated
from support.fuzzing.targets import all_targets

TARGETS = all_targets()
EXAMPLES_FOLDER = Path(__file__).parents[2] / "examples"
SLOW = ("graph", "stage", "assignment", "measurement", "job")
EXAMPLES, SLOW_EXAMPLES = 30, 6

pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number")  # of a damaged certificate


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_not_changed_is_taken_or_refused(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_changed_raises_nothing_but_our_errors(name: str) -> None:
    target = TARGETS[name]
    seeds = [b"", *target.seeds()]

    @settings(max_examples=SLOW_EXAMPLES if name in SLOW else EXAMPLES)
    @given(st.integers(0, len(seeds) - 1), st.integers(0, 2**32), st.binary(max_size=80))
    def check(which: int, seed: int, more: bytes) -> None:
        target.run(mutated(seeds[which] + more, random.Random(seed)))

    check()


def test_mutations_stay_small_and_differ() -> None:
    found = {mutated(bytes(range(100)), random.Random(seed)) for seed in range(50)}
    assert len(found) > 45
    assert max(map(len, found)) <= LARGEST_INPUT


def test_a_target_lets_only_the_projects_errors_pass() -> None:
    def crash(data: bytes) -> None:
        raise IndexError(data)

    def refuse(data: bytes) -> None:
        raise WireError("no")

    Target(name="refuses", decode=refuse, seeds=list, thousands=1).run(b"")
    with pytest.raises(IndexError):
        Target(name="crashes", decode=crash, seeds=list, thousands=1).run(b"")


def test_symbols_that_say_they_are_many_are_given_no_memory() -> None:
    """The library would take what the frame says, whatever the receiver allows."""
    whole = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    ).compress(bytes(2**26))
    plane = (5).to_bytes(4, "little") + len(whole).to_bytes(4, "little") + whole
    with pytest.raises(WireError, match="say how many they are"):
        SymbolCoder().decode(memoryview(b"\x03" + bytes(4) + plane), 5)


def test_a_basis_larger_than_its_messages_is_not_made() -> None:
    """A few bytes could stand for 512 numbers a column."""
    numbers = b"\x80" + bytes(4) + bytes(8) + bytes(8)  # no symbol but 0, in each of the groups
    data = bytes(2048) + numbers * 32
    piece = b"".join(
        [number.to_bytes(width, "little") for number, width in ((1, 4), (512, 2), (0, 4), (len(data), 4), (len(data), 4))]
    )
    with pytest.raises(WireError, match="for 4 rows"):
        Bases().read_piece(memoryview(piece + data), 2048, 4)
    assert not Bases().read_piece(memoryview(piece + data), 2048, 512).nbytes


@pytest.mark.parametrize("path", ["x" * 5000, "~nobody-of-that-name/x", "a\\0b"], ids=["long", "user", "zero"])
@pytest.mark.parametrize("field", ["data.text", "data.tokenizer", "model.weights"])
def test_a_path_that_cannot_be_looked_up_is_a_sentence(field: str, path: str) -> None:
    values = parse_job_text((EXAMPLES_FOLDER / "gpt-bytes.yaml").read_text(encoding="utf-8"), "the job")
    apply_overrides(values, [f'{field}="{path}"'])
    with pytest.raises(JobError, match=f"{field}: .*(cannot be looked up|there is no)"):
        parse_job(values, EXAMPLES_FOLDER)


@pytest.mark.parametrize("text", ["[" * 1000, "a: 2001-13-45", "a: \x01", "a: !!int x", "a: " + "9" * 5000], ids=repr)
def test_yaml_that_cannot_be_read_is_a_sentence(text: str) -> None:
    with pytest.raises(JobError, match="the job"):
        parse_job_text(text, "the job")
