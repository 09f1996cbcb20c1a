"""The dashboard as an ASGI application, for Starlette, FastAPI, or any ASGI server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any
from urllib.parse import quote

from tidemill.core.errors import InvalidOption
from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.live import Live
from tidemill.dashboard.long_body import PartsFromThread
from tidemill.dashboard.request import MOST_BODY, Request
from tidemill.dashboard.response import Response
from tidemill.dashboard.roles import User
from tidemill.dashboard.security import HEADERS

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Who = Callable[[Any], User | Awaitable[User | None] | None]

_STREAM = [
    *HEADERS,
    ("content-type", "text/event-stream"),
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),
]


class AsgiDashboard:
    """An ASGI application. ``user`` gets the scope of a request; it may be async."""

    def __init__(
        self,
        dashboard: Dashboard,
        user: Who | None = None,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.dashboard = dashboard
        self._user = user
        self._live = Live(dashboard.looks, ended)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise InvalidOption(f"the dashboard has no {scope['type']}; it speaks http only")
        user = self._user(scope) if self._user is not None else User("")
        if inspect.isawaitable(user):
            user = await user
        body = await _body(receive)
        if body is None:
            return
        if len(body) > MOST_BODY:
            response = Response("the form is too large", 413, "text/plain; charset=utf-8")
            await _send(send, response)
            return
        try:
            request = _request(scope, body, user)
        except InvalidOption as error:
            await _send(send, Response(str(error), 400, "text/plain; charset=utf-8"))
            return
        if request.path == "/live" and user is not None and request.method == "GET":
            await _while_read(receive, self._send_news(send))
            return
        response = await self.dashboard.mill.threaded(self.dashboard.handle, request)
        if isinstance(response.body, bytes):
            await _send(send, response)
        else:
            run = self.dashboard.mill.threaded
            await _while_read(receive, _send_parts(send, response, run))

    async def _send_news(self, send: Send) -> None:
        """Send the event stream until the server ends."""
        headers = [(name.encode(), value.encode()) for name, value in _STREAM]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._live.listen()) as news:
            async for part in news:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _request(scope: Scope, body: bytes, user: User | None) -> Request:
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        joint = "; " if name == "cookie" else ", "
        headers[name] = f"{headers[name]}{joint}{value}" if name in headers else value
    root = scope.get("root_path", "")
    path = scope["path"]
    if root and path.startswith(f"{root.rstrip('/')}/"):  # ``path`` may begin with the root
        path = path[len(root.rstrip("/")) :]
    elif root and path == root.rstrip("/"):
        path = "/"
    return Request(
        scope["method"],
        path,
        scope.get("query_string", b"").decode("latin-1"),
        body,
        headers=headers,
        root=quote(root, safe="/"),
        user=user,
        secure=scope.get("scheme") == "https",
    )


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None when the client has disconnected.

    The rest of a body that is too large is read and dropped.
    """
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size - len(part) <= MOST_BODY:
            parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _head(response: Response) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in response.headers]


async def _send(send: Send, response: Response) -> None:
    """Send an answer with its whole body at once."""
    body = response.read()
    headers = [*_head(response), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_parts(send: Send, response: Response, run: Callable[..., Awaitable[Any]]) -> None:
    """Send a long answer. Each part is made after the server has sent the previous part."""
    start = {"type": "http.response.start", "status": response.status, "headers": _head(response)}
    await send(start)
    parts = PartsFromThread(response.parts(), run)
    try:
        async for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    finally:
        await run(parts.close)
    await send({"type": "http.response.body", "body": b""})


async def _while_read(receive: Receive, sending: Coroutine[Any, Any, None]) -> None:
    """Send a stream until its end, or until its reader disconnects."""
    sender, gone = asyncio.ensure_future(sending), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([sender, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        sender.cancel()
        gone.cancel()
        await asyncio.wait([sender, gone])
    if not sender.cancelled():
        sender.result()  # raise the error with which the stream has failed


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
