"""Marks of single parameters."""

from __future__ import annotations

from functools import partial

import pytest

release = partial(pytest.param, marks=pytest.mark.release)
"""A set of parameters that the release check tries, and the suite leaves out."""
