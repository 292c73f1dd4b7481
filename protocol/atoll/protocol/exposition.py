"""Numbers in Prometheus' text format, from a coordinator or a peer. Owns no number and no socket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and what they stand for."""


class Collector(Protocol):
    """Gives the numbers as they are now."""

    def collect(self) -> Iterable[Metric]: ...


def text_of(collector: Collector) -> bytes:
    """All that a collector gives, as a scraper takes it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def gauges(prefix: str, helps: Mapping[str, str], values: object) -> Iterator[Metric]:
    """One gauge for each of ``helps``, of the attribute of ``values`` that is called so."""
    for name, text in helps.items():
        yield GaugeMetricFamily(f"{prefix}{name}", text, value=float(getattr(values, name)))


def counters(prefix: str, helps: Mapping[str, str], values: Mapping[str, float]) -> Iterator[Metric]:
    """One counter for each of ``helps``."""
    for name, text in helps.items():
        yield CounterMetricFamily(f"{prefix}{name}", text, value=float(values[name]))


def labelled(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """A gauge with labels."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def labelled_counter(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """A counter with labels; ``_total`` is added to its name."""
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family
