"""`atoll peers`: which words say what."""

from __future__ import annotations

import pytest

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.peers import parse


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("", "", None)),
        (["127.0.0.1:7000"], ("", "", "127.0.0.1:7000")),
        (["remove", "peer-3"], ("remove", "peer-3", None)),
        (["remove", "peer-3", "runs/x"], ("remove", "peer-3", "runs/x")),
        (["allow", "peer-3"], ("allow", "peer-3", None)),
    ],
)
def test_words(words: list[str], expected: tuple[str, str, str | None]) -> None:
    assert parse(words) == expected


@pytest.mark.parametrize("words", [["remove"], ["allow"], ["a", "b"], ["remove", "a", "b", "c"]])
def test_what_cannot_be_meant_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(words)
