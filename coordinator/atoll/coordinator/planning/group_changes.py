"""Other groups of peers for a pipeline's stages: what a search for replicas starts from and what it tries next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, permutations

Group = tuple[int, ...]
Groups = tuple[Group, ...]


def every_grouping(peers: tuple[int, ...], most_stages: int) -> Iterator[Groups]:
    """Every way to hand some of ``peers`` to stages in order, in groups whose own order does not matter."""
    for size in range(1, len(peers) + 1):
        for chosen in combinations(peers, size):
            for count in range(1, min(size, most_stages) + 1):
                yield from (groups for groups in _handed(chosen, count))


def _handed(peers: tuple[int, ...], count: int) -> Iterator[Groups]:
    """All of ``peers`` to ``count`` stages, none of which is left empty."""
    if count == 1:
        yield (peers,)
        return
    for size in range(1, len(peers) - count + 2):
        for first in combinations(peers, size):
            rest = tuple(peer for peer in peers if peer not in first)
            for later in _handed(rest, count - 1):
                yield (first, *later)


def chunks(path: tuple[int, ...], speed: Iterable[float], count: int) -> Groups:
    """``path`` in ``count`` parts of about the same speed, each at least one peer."""
    speeds = list(speed)
    total, groups, start, done = sum(speeds), [], 0, 0.0
    for number in range(count):
        end = start + 1
        done += speeds[start]
        last = len(path) - (count - number - 1)
        while end < last and (number + 1 == count or done + speeds[end] / 2.0 <= total * (number + 1) / count):
            done += speeds[end]
            end += 1
        groups.append(path[start:end])
        start = end
    return tuple(groups)


def changed_groups(groups: Groups, spares: tuple[int, ...], *, fixed_count: bool, most: int | None) -> Iterator[Groups]:
    """Groups near ``groups``: a spare added, taken in for another or as a stage of its own, a peer left out, moved or
    exchanged, two stages made one or one made two. No group gets larger than ``most``."""
    for changed in _changed(groups, spares, fixed_count):
        if most is None or all(len(group) <= most for group in changed):
            yield changed


def _changed(groups: Groups, spares: tuple[int, ...], fixed_count: bool) -> Iterator[Groups]:
    for stage, group in enumerate(groups):
        yield from (_with(groups, stage, (*group, spare)) for spare in spares)
        for place, peer in enumerate(group):
            others = (*group[:place], *group[place + 1 :])
            yield from (_with(groups, stage, (*group[:place], spare, *group[place + 1 :])) for spare in spares)
            if others:
                without = _with(groups, stage, others)
                yield without
                yield from (_with(without, to, (*without[to], peer)) for to in range(len(groups)) if to != stage)
                if not fixed_count:
                    yield from _put_in(without, peer)
    for one, other in combinations(range(len(groups)), 2):
        for mine in range(len(groups[one])):
            for its in range(len(groups[other])):
                first, second = list(groups[one]), list(groups[other])
                first[mine], second[its] = second[its], first[mine]
                yield _with(_with(groups, one, tuple(first)), other, tuple(second))
        swapped = list(groups)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        yield tuple(swapped)
    yield from _reordered(groups)
    if not fixed_count:
        yield from (
            (*groups[:stage], (*groups[stage], *groups[stage + 1]), *groups[stage + 2 :]) for stage in range(len(groups) - 1)
        )
        yield from (added for spare in spares for added in _put_in(groups, spare))
        if len(groups) > 1:
            yield from ((*groups[:stage], *groups[stage + 1 :]) for stage in range(len(groups)))


def _reordered(groups: Groups) -> Iterator[Groups]:
    """Another order of the replicas of a stage: it decides who shares microbatches with whom."""
    for stage, group in enumerate(groups):
        if 1 < len(group) <= 3:
            yield from (_with(groups, stage, other) for other in permutations(group) if other != group)
        elif len(group) > 3:
            yield from (_with(groups, stage, (*group[turn:], *group[:turn])) for turn in range(1, len(group)))


def _with(groups: Groups, stage: int, group: Group) -> Groups:
    return (*groups[:stage], group, *groups[stage + 1 :])


def _put_in(groups: Groups, peer: int) -> Iterator[Groups]:
    """A stage of ``peer`` alone, at every place."""
    return ((*groups[:place], (peer,), *groups[place:]) for place in range(len(groups) + 1))
