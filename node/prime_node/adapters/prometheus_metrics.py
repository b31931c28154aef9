"""Metrics by prometheus-client, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prime_node.ports.metrics import Metric, MetricKind
from prime_protocol.limits import NAME_CHARS_MAX
from prime_protocol.visible import printable


class PrometheusMetrics:
    """Implementation of ports.metrics.Metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._counted: dict[tuple[object, ...], Counter] = {}
        """Counters of each name and labels, so that a count looks for its labels once."""
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def declare(self, *metrics: Metric) -> None:
        """Register metrics. Idempotent."""
        for metric in metrics:
            arguments = (metric.name, metric.help, metric.labels)
            match metric.kind:
                case MetricKind.COUNTER if metric.name not in self._counters:
                    self._counters[metric.name] = Counter(*arguments, registry=self._registry)
                case MetricKind.GAUGE if metric.name not in self._gauges:
                    self._gauges[metric.name] = Gauge(*arguments, registry=self._registry)
                case MetricKind.HISTOGRAM if metric.name not in self._histograms:
                    buckets = metric.buckets or Histogram.DEFAULT_BUCKETS
                    self._histograms[metric.name] = Histogram(*arguments, registry=self._registry, buckets=buckets)

    def add(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        key = (name, *labels.items())
        counter = self._counted.get(key)
        if counter is None:
            counter = self._counters[name].labels(**_shown(labels)) if labels else self._counters[name]
            self._counted[key] = counter
        counter.inc(amount)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        gauge = self._gauges[name]
        (gauge.labels(**_shown(labels)) if labels else gauge).set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        histogram = self._histograms[name]
        (histogram.labels(**_shown(labels)) if labels else histogram).observe(value)

    def exposition(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


def _shown(labels: dict[str, str]) -> dict[str, str]:
    """Return labels in printable form: one may be an untrusted name of an environment, or of a number measured by a validator."""
    return {label: printable(str(value), NAME_CHARS_MAX) for label, value in labels.items()}
