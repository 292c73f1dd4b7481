"""Lists of names as sentences have them."""

from __future__ import annotations

import pytest

from atoll.protocol.wording import first_of, listed


@pytest.mark.parametrize(
    ("names", "words"),
    [("", ""), ("a", "a"), ("ab", "a and b"), ("abcd", "a, b, c and d"), ("abcdef", "a, b, c, d and 2 more")],
)
def test_a_few_names_are_all_said_and_of_many_the_first(names: str, words: str) -> None:
    assert listed(names) == words


@pytest.mark.parametrize(("names", "words"), [("", ""), ("abc", "a; b; c"), ("abcde", "a; b; c and 2 more")])
def test_the_first_ones_and_how_many_more(names: str, words: str) -> None:
    assert first_of(names, separator="; ") == words
