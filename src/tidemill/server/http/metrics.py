"""Metrics for Prometheus, at ``/metrics``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.metrics import CONTENT_TYPE, Collector, exposition
from tidemill.server.http.backend import Backend
from tidemill.server.http.exchange import require
from tidemill.server.tokens import Role


def metrics_route(backend: Backend) -> Route:
    """The route of the metrics, for viewers, or for everybody with ``public_metrics``."""
    collector = Collector(backend.mill)

    async def metrics(request: Request) -> Response:
        if not backend.settings.public_metrics:
            require(request.scope, Role.VIEWER)
        families = await backend.run(collector.families)
        return Response(exposition(families), headers={"content-type": CONTENT_TYPE})

    return Route("/metrics", metrics)
