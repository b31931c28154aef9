"""The trainer's own /metrics."""

from __future__ import annotations

from prime_node.ports.metrics import Metrics
from prime_node.ports.web import Request, Response, Route


def metrics_route(metrics: Metrics) -> Route:
    """Return the route GET /metrics, in Prometheus's format."""

    async def answer(request: Request) -> Response:
        body, content_type = metrics.exposition()
        return Response(body, content_type=content_type)

    return Route("GET", "/metrics", answer)
