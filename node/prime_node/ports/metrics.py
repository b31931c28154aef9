"""Metrics: counters, gauges and durations for operators. Nothing is decided by them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """What a role reports. Example: Metric(MetricKind.COUNTER, "prime_uploads_total", "Bundles received.")."""

    kind: MetricKind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; empty: prometheus-client's, which suit seconds."""


class Metrics(Protocol):
    """Cheap, never blocks, never raises for a metric that was declared."""

    def declare(self, *metrics: Metric) -> None:
        """Before anything is reported. Idempotent for the same metric."""
        ...

    def add(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Raise a counter."""
        ...

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        ...

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Put a value into a histogram."""
        ...

    def exposition(self) -> tuple[bytes, str]:
        """All of them as text, and its content type."""
        ...
