"""The ASGI application: what lies under which path.

/v1/…          the JSON API (:mod:`.api`)
/v1/broker/…   the broker seam, for workers on other machines (:mod:`.calls`)
/health        200 while the process serves
/ready         200 when the store answers, too; it says when puts are refused
/, /v1/docs    a page for people
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Receive, Scope, Send

from tidemill.server.api import ENDPOINTS
from tidemill.server.backend import Backend
from tidemill.server.edge import Edge, nothing_at
from tidemill.server.endpoints import Endpoints
from tidemill.server.logs import AccessLog
from tidemill.server.openapi import describe
from tidemill.server.pages import docs_page
from tidemill.server.problems import Problem

__all__ = ["make_app"]

READY_WITHIN = 5.0
"""Seconds the store has to answer before the server says that it is not ready."""


def make_app(backend: Backend, log: AccessLog | None = None) -> Edge:
    """The application of a server. Its backend is given up by who made it."""
    description = msgspec.json.encode(describe(ENDPOINTS))
    page = docs_page(ENDPOINTS)

    async def openapi(_: Request) -> Response:
        return Response(description, media_type="application/json")

    async def docs(_: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        return Response(page, media_type="text/html", headers=headers)

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    looks: list[asyncio.Future[dict[str, Any]]] = []  # one at most, which all that ask share

    async def ready(_: Request) -> Response:
        if backend.stopping.is_set():
            raise Problem("unavailable", "the server is about to end")
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
    ]
    with contextlib.suppress(ModuleNotFoundError):
        calls = importlib.import_module("tidemill.server.calls")
        routes.append(Mount("/v1/broker", routes=calls.routes(backend)))
    other = Router(routes, redirect_slashes=False, default=_nothing)
    return Edge(Endpoints(backend, ENDPOINTS, other), backend.settings, log)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise nothing_at(scope["path"])


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
