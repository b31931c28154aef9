"""The newest row of metrics as gauges, one for each name: `loss` becomes prime_trainer_loss.

A name with a slash is one environment's: `reward_mean/words` becomes
prime_trainer_reward_mean_by_environment{environment="words"}.
"""

from __future__ import annotations

import math
import re
from typing import Any

from prime_node.ports.metrics import Metric, MetricKind, Metrics
from prime_node.ports.web import Request, Response, Route


class Gauges:
    """Implements observe.Recorder."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def record(self, **fields: Any) -> None:
        """What is no number is left out."""
        for field, value in fields.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            base, _, environment = field.partition("/")
            labels = {"environment": environment} if environment else {}
            name = "prime_trainer_" + re.sub(r"[^a-zA-Z0-9_]", "_", base) + ("_by_environment" if environment else "")
            self._metrics.declare(Metric(MetricKind.GAUGE, name, f"{base} of the newest row.", tuple(labels)))
            self._metrics.set(name, float(value), **labels)

    def close(self) -> None:
        """Gauges are read until the process ends."""


def metrics_route(metrics: Metrics) -> Route:
    """GET /metrics, as Prometheus asks for it."""

    async def answer(request: Request) -> Response:
        body, content_type = metrics.exposition()
        return Response(body, content_type=content_type)

    return Route("GET", "/metrics", answer)
