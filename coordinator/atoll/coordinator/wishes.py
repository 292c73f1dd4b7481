"""From the job's wishes about the placement to what the planner is asked. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from atoll.coordinator.planning.codecs import codecs_allowed, slowest_codec
from atoll.coordinator.planning.costs import Constraints
from atoll.coordinator.planning.segments import PeerOffer, Segments
from atoll.protocol.errors import JobError, PlacementError
from atoll.protocol.graph import Node, OpGraph, ParameterReference
from atoll.protocol.job import Job
from atoll.protocol.job_errors import suggestion

COMMIT_SECONDS = 0.005
"""What a coordinator takes to write a step down for good, mostly its disk, and to tell the peers."""


def constraints_of(job: Job, pins: tuple[tuple[int, str], ...], peers: Sequence[PeerOffer] = ()) -> Constraints:
    """What ``job`` asks of a plan on ``peers``; ``pins`` are those of ``pinned_segments``."""
    wishes, compression = job.plan, job.network.compression
    return Constraints(
        num_microbatches=job.training.num_microbatches,
        num_stages=None if wishes.stages == "auto" else wishes.stages,
        num_replicas=None if wishes.replicas == "auto" else wishes.replicas,
        in_flight=None if wishes.in_flight == "auto" else wishes.in_flight,
        recompute=None if wishes.recompute == "auto" else wishes.recompute,
        pins=pins,
        trusted_ends=wishes.trusted_ends,
        forward_codecs=tuple(slowest_codec(name, peers) for name in codecs_allowed(compression.forward, compression)),
        backward_codecs=tuple(slowest_codec(name, peers) for name in codecs_allowed(compression.backward, compression)),
        commit_seconds=COMMIT_SECONDS,
    )


def pinned_segments(job: Job, graph: OpGraph, segments: Segments) -> tuple[tuple[int, str], ...]:
    """The segments that the job ties to a peer: those with parameters of a pinned module.

    Raises JobError for a module that is not there, or when two peers are to have what cannot be cut apart.
    """
    pins: dict[int, tuple[str, str]] = {}
    for module, peer in job.plan.pinned_modules.items():
        found = list(_segments_with(module, graph, segments))
        if not found:
            what = "the model has no module with parameters of that path"
            raise JobError(f"plan.pin.{module}", f"{what}; {_like(module, graph)}")
        for segment in found:
            other, owner = pins.setdefault(segment, (module, peer))
            if owner != peer:
                meet = f"{other} is pinned to {owner!r} and meets {module} where the model cannot be cut"
                raise JobError(f"plan.pin.{module}", f"{meet}; pin both to one peer")
    return tuple((segment, peer) for segment, (_, peer) in sorted(pins.items()))


def _like(module: str, graph: OpGraph) -> str:
    """A module that may have been meant, else the outermost ones."""
    paths = [node.module.split(".") for node in graph.nodes if _has_parameters(node)]
    known = sorted({".".join(path[: depth + 1]) for path in paths for depth in range(len(path))})
    close = difflib.get_close_matches(module, known, n=1)
    return suggestion(module, close or [path for path in known if "." not in path])


def _segments_with(module: str, graph: OpGraph, segments: Segments) -> Iterator[int]:
    for number, (first, end) in enumerate(pairwise(segments.positions)):
        nodes = [node for node in graph.nodes[first:end] if _has_parameters(node)]
        if any(node.module == module or node.module.startswith(f"{module}.") for node in nodes):
            yield number


def _has_parameters(node: Node) -> bool:
    return any(isinstance(reference, ParameterReference) for reference in node.references())


def offers_under(job: Job, peers: Sequence[PeerOffer]) -> tuple[PeerOffer, ...]:
    """The peers, with those marked that neither the job names as trusted nor the operator invited as such. Raises
    PlacementError when a pin's peer is not there, or nobody is whom the ends could be left to."""
    names = {peer.name for peer in peers}
    for module, owner in job.plan.pinned_modules.items():
        if owner not in names:
            raise PlacementError(f"plan.pin gives {module} to {owner!r}, which has not joined; start it or remove the pin")
    if not job.plan.trusted and not job.plan.trusted_ends:
        return tuple(peers)
    trusted = {*job.plan.trusted, *(peer.name for peer in peers if peer.vouched)}
    if job.plan.trusted_ends and not trusted & names:
        named = f"one of plan.trusted ({', '.join(sorted(trusted))}) or " if trusted else ""
        raise PlacementError(
            f"plan.trusted_ends needs {named}a peer that was invited with `atoll invite --role trusted`, and none has joined; "
            "start one of them"
        )
    return tuple(replace(peer, trusted=peer.trusted and peer.name in trusted) for peer in peers)
