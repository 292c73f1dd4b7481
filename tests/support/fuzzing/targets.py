"""All that is fuzzed."""

from __future__ import annotations

from support.fuzzing.codecs import codec_targets
from support.fuzzing.files import file_targets
from support.fuzzing.graphs import graph_targets
from support.fuzzing.target import Target
from support.fuzzing.wire import wire_targets


def all_targets() -> dict[str, Target]:
    """By name."""
    return {target.name: target for target in (*wire_targets(), *codec_targets(), *graph_targets(), *file_targets())}
