"""Every decoder fed by atheris, in processes that may take neither much memory nor long for an input."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support.fuzzing.campaign import Found, run_campaign
from support.fuzzing.targets import all_targets

LEAST_INPUTS = 10_000_000

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no build for this platform"),
]


def test_the_fuzzer_reaches_a_decoder_and_counts(tmp_path: Path) -> None:
    targets = all_targets()
    found = run_campaign([targets["token"]], tmp_path, scale=2 / targets["token"].thousands)
    assert [(one.target, one.crash) for one in found] == [("token", None)], described(found)
    assert found[0].inputs >= 2000


@pytest.mark.release
@pytest.mark.timeout(6 * 3600)
def test_ten_million_inputs_find_nothing(tmp_path: Path) -> None:
    found = run_campaign(list(all_targets().values()), tmp_path)
    assert all(one.crash is None for one in found), described(found)
    assert sum(one.inputs for one in found) >= LEAST_INPUTS


def described(found: list[Found]) -> str:
    """What was found, to be kept as a test."""
    return "\n\n".join(f"{one.target} after {one.inputs}: {one.crash!r}\n{one.words}" for one in found if one.crash is not None)
