"""Metrics: counters, gauges and durations for operators. No decision depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class MetricKind(StrEnum):
    """Type of a metric, as in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric that a role reports. Example: Metric(MetricKind.COUNTER, "prime_uploads_total", "Bundles received.")."""

    kind: MetricKind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets. Empty: prometheus-client's defaults, which suit seconds."""


class Metrics(Protocol):
    """Registry of metrics. Calls are cheap, never block, and never raise for a declared metric."""

    def declare(self, *metrics: Metric) -> None:
        """Declare metrics before any value is reported. Idempotent for the same metric."""

    def add(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Increase a counter."""

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Add a value to a histogram."""

    def exposition(self) -> tuple[bytes, str]:
        """Return all metrics as text, and its content type."""
