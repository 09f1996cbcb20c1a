"""The dashboard as an ASGI and as a WSGI application."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.request import MOST_BODY
from tidemill.dashboard.response import LongResponse
from tidemill.dashboard.roles import User

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Who = Callable[[Any], User | Awaitable[User | None] | None]

_OTHERS = Router()  # answers the start and the end of a server, and refuses web sockets


class AsgiDashboard:
    """An ASGI application. ``user`` gets the scope of a request; it may be async."""

    def __init__(self, dashboard: Dashboard, user: Who | None = None) -> None:
        self.dashboard = dashboard
        self._user = user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await _OTHERS(scope, receive, send)
            return
        user = self._user(scope) if self._user is not None else User("")
        if inspect.isawaitable(user):
            user = await user
        body = bytearray()
        try:
            async for part in StarletteRequest(scope, receive).stream():
                body += part[: MOST_BODY + 1 - len(body)]  # read and drop what is too much
        except ClientDisconnect:
            return
        handle = self.dashboard.handle
        response = await self.dashboard.mill.runtime.threaded(handle, scope, user, bytes(body))
        await response(scope, receive, send)


class WsgiDashboard:
    """A WSGI application. ``user`` gets the ``environ`` of a request.

    Each request runs in the thread of its server, without an event loop. So a server may fork after
    it has loaded the application, and ``user`` may use what the site keeps for each thread.
    """

    def __init__(
        self, dashboard: Dashboard, user: Callable[[Environ], User | None] | None = None
    ) -> None:
        self.dashboard = dashboard
        self._user = user

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        user = self._user(environ) if self._user is not None else User("")
        length = environ.get("CONTENT_LENGTH") or "0"
        size = min(int(length), MOST_BODY + 1) if length.isdigit() else 0
        body = environ["wsgi.input"].read(size) if size else b""
        response = self.dashboard.handle(scope_of(environ), user, body)
        status = HTTPStatus(response.status_code)
        headers = [(name.decode(), value.decode("latin-1")) for name, value in response.raw_headers]
        start_response(f"{status.value} {status.phrase}", headers)
        return parts_of(response)


def scope_of(environ: Mapping[str, Any]) -> Scope:
    """The scope of ASGI for a request of WSGI."""
    root, path = (
        str(environ.get(name, "")).encode("latin-1").decode("utf-8", "replace")
        for name in ("SCRIPT_NAME", "PATH_INFO")
    )
    return {
        "type": "http",
        "method": environ["REQUEST_METHOD"],
        "scheme": environ.get("wsgi.url_scheme", "http"),
        "root_path": root,
        "path": root + path,
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1", "replace"),
        "headers": [
            (_header(name), str(value).encode("latin-1", "replace"))
            for name, value in environ.items()
            if name.startswith("HTTP_") or name == "CONTENT_TYPE"
        ],
    }


def _header(name: str) -> bytes:
    return name.removeprefix("HTTP_").replace("_", "-").lower().encode("latin-1", "replace")


def parts_of(response: Response) -> Iterable[bytes]:
    """The body of an answer for WSGI, without empty parts. It may be closed."""
    if isinstance(response, LongResponse):
        return _filled(response.parts)
    return [bytes(response.body)]


def _filled(parts: Generator[bytes]) -> Generator[bytes]:
    try:
        yield from filter(None, parts)
    finally:
        parts.close()
