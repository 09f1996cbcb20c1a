"""The ASGI application: the parts of a server by their paths.

/v1/…          the JSON API (:mod:`.api`)
/v1/broker/…   the broker contract, for workers on other machines (:mod:`.broker_rpc`)
/health        200 while the process serves
/ready         200 while the store answers; the body says why the store refuses puts, if it does
/metrics       metrics for Prometheus
/v1/docs       the documentation page of the API
/…             the dashboard (:mod:`.dashboard_mount`); if it is off, / is the documentation page
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Receive, Scope, Send

from tidemill.metrics import CONTENT_TYPE, Collector, exposition
from tidemill.server.http import broker_rpc
from tidemill.server.http.access import Access
from tidemill.server.http.access_log import AccessLog
from tidemill.server.http.api import ENDPOINTS
from tidemill.server.http.backend import Backend
from tidemill.server.http.dashboard_mount import DashboardMount
from tidemill.server.http.endpoints import Endpoints
from tidemill.server.http.exchange import require
from tidemill.server.http.openapi import describe, docs_page
from tidemill.server.http.problems import Problem
from tidemill.server.http.request_pipeline import RequestPipeline, nothing_at
from tidemill.server.tokens import Role

READY_WITHIN = 5.0  # seconds in which the store must answer; else the server is not ready


def make_app(backend: Backend, access_log: AccessLog | None = None) -> RequestPipeline:
    """The application of a server. The caller closes the backend."""
    described = describe(ENDPOINTS)
    description, page = msgspec.json.encode(described), docs_page(described)

    async def openapi(_: Request) -> Response:
        return Response(description, media_type="application/json")

    async def docs(_: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        return Response(page, media_type="text/html", headers=headers)

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    looks: list[asyncio.Future[dict[str, Any]]] = []  # at most one, shared by all requests

    async def ready(_: Request) -> Response:
        if backend.stopping.is_set():
            raise Problem("unavailable", "the server is shutting down")
        if not looks or looks[0].done():
            looks[:] = [asyncio.ensure_future(backend.run(backend.mill.broker.info))]
        try:
            async with asyncio.timeout(READY_WITHIN):
                facts = await asyncio.shield(looks[0])
        except TimeoutError:
            raise Problem("unavailable", "the store does not answer") from None
        refused = backend.refusal(facts)
        return _json({"status": "ready", **({"puts_refused": refused} if refused else {})})

    routes: list[BaseRoute] = [
        Route("/", docs),
        Route("/v1/docs", docs),
        Route("/v1/openapi.json", openapi),
        Route("/health", health),
        Route("/ready", ready),
        _metrics(backend),
        Mount("/v1/broker", routes=broker_rpc.routes(backend)),
    ]
    other = Router(routes, redirect_slashes=False, default=_nothing)
    settings, access = backend.settings, Access(backend.settings)
    dashboard = DashboardMount(backend, access) if settings.dashboard else None
    endpoints = Endpoints(backend, ENDPOINTS)
    return RequestPipeline(endpoints, other, settings, access_log, access, dashboard)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise nothing_at(scope["path"])


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _metrics(backend: Backend) -> Route:
    """The route of the metrics, for viewers, or for everybody with ``public_metrics``."""
    collector = Collector(backend.mill)

    async def metrics(request: Request) -> Response:
        if not backend.settings.public_metrics:
            require(request.scope, Role.VIEWER)
        families = await backend.run(collector.families)
        return Response(exposition(families), headers={"content-type": CONTENT_TYPE})

    return Route("/metrics", metrics)
