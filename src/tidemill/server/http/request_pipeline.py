"""The request pipeline: the steps that every request takes, and the answer when a step fails.

admit          bounds of the body, and the site that the request comes from
authenticate   the token of the client, and its role
limit          the rate of the client's requests
route          the endpoint of the path and the method
authorize      the role and the queues that the endpoint needs
read           the parameters and the body
call           the function of the endpoint; the audit list gets the acts of operators
answer         its result as JSON, or a problem (:mod:`.problems`)
log            one line in the access log
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill.brokers.generic.audit import note
from tidemill.server.http.access import Access, Client
from tidemill.server.http.access_log import AccessLog
from tidemill.server.http.dashboard_mount import DashboardMount
from tidemill.server.http.endpoints import Call, Endpoints, send_answer
from tidemill.server.http.exchange import ClientGone, Exchange, MemoryBudget
from tidemill.server.http.problems import Problem, not_allowed, problem_of
from tidemill.server.http.schemas.jobs import Acted, Done
from tidemill.server.http.schemas.queues import Number, RestoredOut
from tidemill.server.settings import Settings

log = logging.getLogger("tidemill.server")

PUBLIC = frozenset({"/", "/health", "/ready", "/v1/docs", "/v1/openapi.json"})
"""Paths that are served without a token, since they tell nothing about the jobs."""


class RequestPipeline:
    """The ASGI application of a server. ``other`` serves all paths without an endpoint."""

    def __init__(
        self,
        endpoints: Endpoints,
        other: ASGIApp,
        settings: Settings,
        access_log: AccessLog | None = None,
        access: Access | None = None,
        dashboard: DashboardMount | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._other = other
        self._settings = settings
        self._public = PUBLIC | ({"/metrics"} if settings.public_metrics else set())
        self._access = access or Access(settings)
        self._dashboard = dashboard
        self._budget = MemoryBudget(settings.max_memory)
        self._log = access_log
        self._with_token: dict[Exchange, asyncio.Task[Any]] = {}  # of clients with a token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        began = time.perf_counter()
        exchange = Exchange(scope, receive, send, self._settings, self._budget)
        scope["tidemill.exchange"] = exchange
        scope["app"] = self  # makes Starlette raise its errors, so that they become problems
        try:
            await self._handle(exchange)
        except ClientGone:  # uvicorn closes the connection of an incomplete answer
            exchange.status = 499
        except asyncio.CancelledError:
            if exchange.token is None or exchange in self._with_token:
                raise
            await self._answer_error(exchange, _token_ended())
        except Exception as error:
            await self._answer_error(exchange, error)
        finally:
            exchange.end()
            self._with_token.pop(exchange, None)
            if self._log is not None:
                self._log.add(exchange, time.perf_counter() - began)

    async def _handle(self, exchange: Exchange) -> None:
        is_page = self._dashboard is not None and self._dashboard.serves(exchange)
        self._let_in(exchange, is_page)
        if self._dashboard is not None and is_page:
            await self._dashboard(exchange, exchange.receive, exchange.send)
            return
        endpoint, values = self._endpoints.route(exchange.scope)
        if endpoint is None:
            await self._other(exchange.scope, exchange.receive, exchange.send)
            return
        await self._endpoints.authorize(endpoint, exchange, values)
        call = Call(self._endpoints.backend, exchange, endpoint.status)
        try:
            arguments = await endpoint.read(call, values)
            exchange.acts = bool(endpoint.audit)
            result = await endpoint.handler(**arguments)
            if endpoint.audit and call.status == endpoint.status:  # another: nothing has changed
                await _note_act(call, endpoint.audit, values, arguments, result)
        finally:
            call.end_turn()
        await send_answer(call, result)

    def _let_in(self, exchange: Exchange, is_page: bool) -> None:
        """Admit, authenticate and limit. A request that is refused counts for the rate, too."""
        is_public = not is_page and exchange.scope["path"] in self._public
        try:
            self._admit(exchange)
            if is_page and self._dashboard is not None:
                client = self._dashboard.identify(exchange)
                if client is not None:
                    self._note_client(exchange, client)
            elif not is_public:
                client = self._access.identify(exchange.header(b"authorization"))
                self._note_client(exchange, client)
        except Problem:
            is_public = False
            raise
        finally:
            if not is_public:
                self._access.check_rate(exchange.name or exchange.address)

    def _admit(self, exchange: Exchange) -> None:
        exchange.check()
        self._access.check_origin(
            exchange.scope["method"],
            exchange.header(b"host"),
            exchange.header(b"origin"),
            exchange.header(b"sec-fetch-site"),
        )

    def _note_client(self, exchange: Exchange, client: Client) -> None:
        exchange.known = True
        exchange.name, exchange.role, exchange.token = client
        if client.token is not None and (task := asyncio.current_task()) is not None:
            self._with_token[exchange] = task

    async def _answer_error(self, exchange: Exchange, error: Exception) -> None:
        if isinstance(error, HTTPException):
            problem = _problem_of_starlette(exchange, error)
        else:
            problem = problem_of(error)
        if problem is None:
            log.error("request %s failed", exchange.id, exc_info=error)
            problem = Problem(
                "error", "the server failed; its log has the details under the request id"
            )
        if exchange.started:  # too late for a problem: the client sees an answer that ends early
            raise error
        await exchange.answer(
            problem.status, problem.body(exchange.id), b"application/problem+json", problem.headers
        )

    def sweep(self) -> None:
        """End exchanges whose token was revoked or has expired. Called once a second.

        An act that has begun goes on in its thread. So it is listed and answered all the same.
        """
        tokens = self._access.tokens
        if tokens is None:
            return
        tokens.refresh()
        for exchange in list(self._with_token):
            token = exchange.token
            if token is not None and not exchange.acts and not tokens.is_good(token):
                self._with_token.pop(exchange).cancel()


async def _note_act(
    call: Call, what: str, values: Sequence[str], arguments: Mapping[str, Any], result: Any
) -> None:
    """Write an act of an operator into the audit list, with the number of changed things."""
    target, count = ", ".join(values), 1
    if isinstance(result, Done | Acted):
        ids = result.ids if isinstance(result, Acted) else arguments["body"].ids
        done = [job_id for job_id, is_done in zip(ids, result.done, strict=True) if is_done]
        target, count = ", ".join(done[:5]), len(done)
    elif isinstance(result, Number | RestoredOut):
        count = result.count
    if count or call.exchange.scope["method"] == "DELETE":
        who = f"{call.exchange.name or call.exchange.address}, HTTP API"
        await call.backend.run(note, call.backend.mill.broker, who, what, target, count)


def nothing_at(path: str) -> Problem:
    return Problem("not-found", f"there is nothing at {path[:200]!r}; /v1/docs lists all paths")


def _token_ended() -> Problem:
    ending = "the token was revoked or has expired; use another one"
    return Problem("unauthorized", ending, headers={"connection": "close"})


def _problem_of_starlette(exchange: Exchange, error: HTTPException) -> Problem | None:
    if error.status_code == 405:
        return not_allowed(dict(error.headers or {}).get("Allow", "").split(", "))
    if error.status_code == 404:
        return nothing_at(exchange.scope["path"])
    return Problem("invalid-request", error.detail) if error.status_code < 500 else None
