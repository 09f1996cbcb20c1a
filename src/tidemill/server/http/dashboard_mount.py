"""The dashboard, at all paths of a server that do not belong to its API.

A browser logs in with a token, which it keeps in a cookie. The API does not read the cookie, so a
page of another site cannot use the API with the cookie.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from tidemill.dashboard.dashboard import AsgiDashboard, Dashboard
from tidemill.dashboard.roles import Role, User
from tidemill.dashboard.security import Login
from tidemill.errors import InvalidOption
from tidemill.server.http.access import Access, Client, bearer_token
from tidemill.server.http.backend import Backend
from tidemill.server.http.exchange import Exchange
from tidemill.server.http.problems import Problem

_API = ("/v1/", "/health", "/ready", "/metrics")


class DashboardMount:
    def __init__(self, backend: Backend, access: Access) -> None:
        settings = backend.settings
        self._access = access
        has_tokens = access.tokens is not None
        self._login = Login(self._user_of, f"tidemill_token_{settings.port}")
        self._dashboard = Dashboard(
            backend.mill,
            app=settings.app or "MODULE:VAR",
            see_arguments=settings.see_arguments,
            extra=self._login.routes.list if has_tokens else (),
            ended=backend.stopping.is_set,
        )
        self._app = AsgiDashboard(self._dashboard, self._who)

    def serves(self, exchange: Exchange) -> bool:
        """True when a request is for the dashboard, and not for the API."""
        path = exchange.scope["path"]
        if path.startswith(_API):
            return False
        return self._dashboard.serves(path) or b"text/html" in exchange.accept

    def identify(self, exchange: Exchange) -> Client | None:
        """The client of a request, by its token or its cookie; None for an unknown client.

        A scheme other than Bearer, such as Basic, is meant for a proxy in front of this server.
        """
        authorization = exchange.header(b"authorization")
        if not bearer_token(authorization) and self._access.tokens is not None:
            token = self._login.token_of(exchange.header(b"cookie"))
            authorization = f"Bearer {token}" if token else ""
        try:
            client = self._access.identify(authorization)
        except Problem:
            return None
        return None if client.token is not None and client.token.queues else client

    async def __call__(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Answer a request whose client has been identified."""
        await self._app(exchange.scope, receive, send)

    def _who(self, scope: Scope) -> User | None:
        exchange: Exchange = scope["tidemill.exchange"]
        return User(exchange.name, Role(exchange.role)) if exchange.known else None

    def _user_of(self, token: str) -> User | None:
        """The user of a token that somebody logs in with."""
        try:
            client = self._access.identify(f"Bearer {token}")
        except Problem:
            return None
        if client.token is not None and client.token.queues:
            raise InvalidOption(
                f"the token {client.name!r} is for some queues only, and the dashboard shows the "
                "whole store; use a token without --queue"
            )
        return User(client.name, Role(client.role))
