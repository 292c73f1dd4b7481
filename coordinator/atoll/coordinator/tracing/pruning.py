"""Drops nodes that contribute nothing, and numbers the rest anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import cast

from atoll.coordinator.tracing.conversion import Converted
from atoll.coordinator.tracing.effects import AliasClasses
from atoll.protocol.graph import Argument, Node, Reference, ValueReference, references_in
from atoll.protocol.ids import NodeIndex


def prune(converted: Converted) -> Converted:
    """``converted`` without the nodes that reach neither the loss, nor a metric, nor a buffer's memory."""
    kept = _contributing(converted)
    numbers = {node.index: NodeIndex(number) for number, node in enumerate(kept)}

    def renumbered(reference: Reference) -> Reference:
        if isinstance(reference, ValueReference):
            return ValueReference(numbers[reference.node], reference.output)
        return reference

    return dataclasses.replace(
        converted,
        nodes=tuple(dataclasses.replace(with_references(node, renumbered), index=numbers[node.index]) for node in kept),
        loss=cast(ValueReference, renumbered(converted.loss)),
        metrics=tuple((name, cast(ValueReference, renumbered(value))) for name, value in converted.metrics),
    )


def _contributing(converted: Converted) -> list[Node]:
    aliases = AliasClasses(converted.nodes)
    wanted: set[Reference] = {converted.loss, *(value for _, value in converted.metrics)}
    live = {aliases.root(reference) for reference in wanted}
    kept: set[NodeIndex] = set()
    writes: Mapping[NodeIndex, list[Reference]] = _roots_written(aliases)
    changed = True
    while changed:
        changed = False
        for node in reversed(converted.nodes):
            if node.index in kept:
                continue
            used = any(ValueReference(node.index, output) in wanted for output in range(len(node.outputs)))
            written = writes.get(node.index, ())
            if used or any(root in live or any(True for _ in aliases.buffers(root)) for root in written):
                kept.add(node.index)
                changed = True
                needed = {*node.references(), *references_in(node.evaluation or ())}
                wanted |= needed
                live |= {aliases.root(reference) for reference in needed}
    return [node for node in converted.nodes if node.index in kept]


def _roots_written(aliases: AliasClasses) -> dict[NodeIndex, list[Reference]]:
    written: dict[NodeIndex, list[Reference]] = {}
    for root, writers in aliases.writers.items():
        for node in writers:
            written.setdefault(node.index, []).append(root)
    return written


def with_references(node: Node, replace: Callable[[Reference], Reference]) -> Node:
    """``node`` with every reference in its arguments replaced."""
    return dataclasses.replace(
        node,
        arguments=cast(tuple[Argument, ...], _replaced(node.arguments, replace)),
        keywords=tuple((name, _replaced(value, replace)) for name, value in node.keywords),
        evaluation=None if node.evaluation is None else cast(tuple[Argument, ...], _replaced(node.evaluation, replace)),
    )


def _replaced(argument: Argument, replace: Callable[[Reference], Reference]) -> Argument:
    if isinstance(argument, tuple):
        return tuple(_replaced(item, replace) for item in argument)
    for reference in references_in(argument):
        return replace(reference)
    return argument
