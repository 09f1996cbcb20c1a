"""How a part of the JSON API is declared, found by its path, called and answered.

An :class:`Endpoint` names a method, a path and a function; what the function takes and returns is
in its annotations, and the description of the API (:mod:`.openapi`) is made of the same ones:

    the names in the path's braces   text, each one segment of the path (``%2F`` is no slash)
    ``query``                        a struct, one field for each parameter
    ``body``                         a struct as JSON, or ``Raw`` for whatever comes
    ``call``                         the request itself, for what goes beyond
"""

from __future__ import annotations

import inspect
import typing
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from tidemill.server.backend import Backend
from tidemill.server.budget import SMALL
from tidemill.server.edge import Exchange, require
from tidemill.server.problems import Problem, not_allowed
from tidemill.server.queue_tokens import check_path, limits
from tidemill.server.receipts import Receipt, parse, sealed
from tidemill.server.sentences import lone_surrogate, sentence_of
from tidemill.server.tokens import Role

__all__ = ["Call", "Document", "Endpoint", "Endpoints", "Raw", "Stream", "json_of"]

T = TypeVar("T")

_PLAIN_TYPES = ("", "application/json", "text/json")

_UNKNOWN = "unknown field {:.80} in the {}; this call takes none there"

LARGE = 256 * 1024
"""Bytes of a body from which on a thread parses it: the event loop serves others meanwhile."""


class Raw(msgspec.Struct):
    """A body as it came, of whatever type it says it is."""

    data: bytes
    content_type: str


class Document(msgspec.Struct):
    """An answer that is encoded already."""

    data: bytes
    media: str = "application/json"


class Stream(msgspec.Struct):
    """An answer that goes on: server-sent events. ``shared`` events are kept once for all."""

    events: AsyncIterator[bytes]
    shared: bool = False


class Call:
    """One call of an endpoint. ``status`` is that of its answer, and may be changed."""

    __slots__ = ("backend", "exchange", "headers", "large", "status")

    def __init__(self, backend: Backend, exchange: Exchange, status: int) -> None:
        self.backend = backend
        self.exchange = exchange
        self.status = status
        self.headers: dict[str, str] | None = None
        self.large = False  # it has the turn of the large bodies

    async def beside(self, function: Callable[[], T], size: int) -> T:
        """The value of a function that handles so many bytes; of many a thread makes the call."""
        if size <= LARGE and not self.large:
            return function()
        await self._take_turn()
        try:
            return await self.backend.run(function)
        finally:
            self.end_turn()

    async def decoded(self, decode: Callable[[bytes], Any], data: bytes, *, keeps: bool) -> Any:
        """What a large body says: one at a time, since it may become many times its size.

        With ``keeps`` it has its turn until :meth:`end_turn`.
        """
        await self._take_turn()
        try:
            return await self.backend.run(decode, data)
        finally:
            if not keeps:
                self.end_turn()

    async def _take_turn(self) -> None:
        if not self.large:
            await self.backend.large.acquire()
            self.large = True

    def end_turn(self) -> None:
        """Let the next large body be handled."""
        if self.large:
            self.large = False
            self.backend.large.release()

    def sealed(self, receipt: str) -> str:
        """A receipt as this client gets it."""
        return sealed(receipt, self._secret) if self._secret else receipt

    def parse(self, receipt: str) -> Receipt:
        """What a receipt of this client says.

        Raises:
            Problem: it is none, was handed to another token, or needs no settling.
        """
        return parse(receipt, self._secret)

    @property
    def _secret(self) -> str:
        """What seals the receipts of a token for some queues; empty for all others."""
        token = self.exchange.token
        return token.sha256 if token is not None and token.queues else ""


class Endpoint:
    """One method on one path.

    Args:
        handler: its docstring says what it does, first in one line.
        role: who may call it.
        status: of the answer when all went well, and ``also``: others that it may have.
        makes: decodes a large body, of which one call of :meth:`Call.beside` makes what is stored.
        limited: it checks itself what a token for some queues may reach.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Callable[..., Awaitable[Any]],
        role: Role = Role.VIEWER,
        *,
        status: int = 200,
        also: Sequence[int] = (),
        makes: Callable[[bytes], Any] | None = None,
        limited: bool = False,
    ) -> None:
        self.method = method
        self.path = path
        self.handler = handler
        self.role = role
        self.status = status
        self.also = tuple(also)
        self.makes = makes
        self.limited = limited
        hints = typing.get_type_hints(handler)
        self.answer = hints.pop("return")
        self.query = hints.get("query")
        self.body = hints.get("body")
        self.names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        self.takes = tuple(inspect.signature(handler).parameters)
        assert set(self.takes) <= {"call", "query", "body", *self.names}, path
        if self.body is not None and self.body is not Raw:
            self._decode: Any = msgspec.json.Decoder(self.body).decode
        fields = msgspec.structs.fields(self.query) if self.query else ()
        self._lists = {field.encode_name for field in fields if "list[" in str(field.type)}
        self._no_texts = {field.encode_name for field in fields if "str" not in str(field.type)}

    @property
    def may_be_empty(self) -> bool:
        """Whether a request without a body says something; one that makes or changes does not."""
        if self.status == 201 or self.method == "PATCH":
            return False
        return not any(field.required for field in msgspec.structs.fields(self.body or Raw))

    async def __call__(self, call: Call, values: Sequence[str]) -> Any:
        given: dict[str, Any] = dict(zip(self.names, values, strict=True))
        if "call" in self.takes:
            given["call"] = call
        if self.query is not None:
            given["query"] = self._query(call.exchange)
        elif text := call.exchange.scope.get("query_string"):
            name = text.decode("latin-1").partition("=")[0]
            raise Problem("invalid-request", _UNKNOWN.format(name, "query"))
        if self.body is None and self.method != "GET":
            _refuse_fields(await call.exchange.body())
        elif self.body is Raw:
            given["body"] = Raw(await call.exchange.body(), call.exchange.content_type)
        elif self.body is not None:
            data = await self._body(call.exchange)
            if len(data) <= LARGE:
                given["body"] = self._decoded(data)
                return await self.handler(**given)
            try:
                given["body"] = await call.decoded(self._decoded, data, keeps=bool(self.makes))
                return await self.handler(**given)
            finally:
                call.end_turn()
        return await self.handler(**given)

    async def _body(self, exchange: Exchange) -> bytes:
        kind = exchange.content_type.partition(";")[0].strip().lower()
        if kind not in _PLAIN_TYPES and not kind.endswith("+json"):
            raise Problem(
                "unsupported-media-type",
                f"the body must be JSON, with Content-Type: application/json, not {kind[:100]}; "
                "curl says so with --json",
            )
        return await exchange.body()

    def _decoded(self, data: bytes) -> Any:
        if not data:
            if not self.may_be_empty:
                raise Problem("invalid-request", "the body is empty; it must be JSON")
            try:
                return msgspec.convert({}, self.body)
            except msgspec.ValidationError:
                raise Problem("invalid-request", "the body is empty; it must be JSON") from None
        try:
            large = self.makes if len(data) > LARGE else None
            return json_of(data, large or self._decode)
        except msgspec.ValidationError as error:
            raise Problem("invalid-request", sentence_of(error, self.body)) from None

    def _query(self, exchange: Exchange) -> Any:
        text = exchange.scope.get("query_string", b"").decode("latin-1")
        try:
            pairs = urllib.parse.parse_qsl(text, keep_blank_values=True, errors="strict")
        except ValueError:
            raise Problem("invalid-request", "the query is not name=value&…, in UTF-8") from None
        given: dict[str, Any] = {}
        for name, value in pairs:
            if name in self._no_texts and value.lower() == "null":  # which would be read as none
                raise Problem("invalid-request", f"{name}: null cannot be given; leave it out")
            if name in self._lists:
                given.setdefault(name, []).append(value)
            elif name in given:
                raise Problem("invalid-request", f"{name}: it is given twice")
            else:
                given[name] = value
        try:
            return msgspec.convert(given, self.query, strict=False)
        except msgspec.ValidationError as error:
            raise Problem("invalid-request", sentence_of(error, self.query)) from None


def _refuse_fields(data: bytes) -> None:
    """Refuse the body of a call that takes none, unless it is an empty object."""
    if not data:
        return
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Problem("invalid-request", "the body: this call takes none") from None
    if fields:
        raise Problem("invalid-request", _UNKNOWN.format(next(iter(fields)), "body"))


def json_of(data: bytes, decode: Callable[[bytes], Any] = msgspec.json.decode) -> Any:
    """What a body in JSON says.

    Raises:
        Problem: it is no UTF-8, or has half of a surrogate pair.
        msgspec.MsgspecError: it is no JSON, or says something else than it is to.
    """
    try:
        return decode(data)
    except UnicodeDecodeError as error:
        raise Problem(
            "invalid-request", f"the body is no UTF-8, which JSON is: {error.reason}"
        ) from None
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if sentence := lone_surrogate(data):
            raise Problem("invalid-request", sentence) from None
        raise


class Endpoints:
    """Many endpoints as one ASGI application; what is none of them goes to ``other``."""

    def __init__(self, backend: Backend, endpoints: Sequence[Endpoint], other: Any) -> None:
        self._backend = backend
        self._other = other
        self._tree: dict[Any, Any] = {}
        for endpoint in endpoints:
            node = self._tree
            for part in endpoint.path.strip("/").split("/"):
                node = node.setdefault(None if part.startswith("{") else part, {})
            node.setdefault("", {})[endpoint.method] = endpoint

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        methods, values = self._find(scope)
        if not methods:
            await self._other(scope, receive, send)
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        endpoint = methods.get(method)
        if endpoint is None:
            raise not_allowed(methods)
        exchange = require(scope, endpoint.role, whole=False)
        if limits(exchange):
            await check_path(self._backend, exchange, endpoint.names, values, endpoint.limited)
        call = Call(self._backend, exchange, endpoint.status)
        await _answer(call, await endpoint(call, values))

    def _find(self, scope: Any) -> tuple[dict[str, Endpoint], list[str]]:
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        values: list[str] = []
        node = self._tree
        for part in raw.decode("latin-1").strip("/").split("/"):
            fixed = node.get(part) if part else None
            if fixed is None:
                fixed = node.get(None)
                if fixed is None or not part:
                    return {}, []
                values.append(_unquoted(part))
            node = fixed
        return node.get("", {}), values


def _unquoted(part: str) -> str:
    try:
        return urllib.parse.unquote(part, errors="strict") if "%" in part else part
    except ValueError:
        raise Problem("invalid-request", f"the path has {part[:60]!r}, which is no UTF-8") from None


async def _answer(call: Call, answer: Any) -> None:
    exchange = call.exchange
    if isinstance(answer, Stream):
        await _stream(call, answer)
    elif isinstance(answer, Document):
        media = answer.media.encode()
        await exchange.answer(call.status, answer.data, media, call.headers)
    elif answer is None:
        await exchange.answer(204, b"", b"", call.headers)
    else:
        data = msgspec.json.encode(answer)
        if len(data) > SMALL and exchange.scope["method"] == "GET":
            exchange.share.check(len(data))
        await exchange.answer(call.status, data, b"application/json", call.headers)


async def _stream(call: Call, answer: Stream) -> None:
    """Server-sent events, until they end, the client goes, or the server does."""
    import asyncio

    exchange = call.exchange
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    events = answer.events
    if exchange.scope["method"] == "HEAD":  # which would wait for an end that never comes
        await exchange.send({"type": "http.response.body", "body": b""})
        return
    gone = asyncio.ensure_future(exchange.gone())

    async def tell() -> None:
        async for event in events:
            if len(event) > SMALL and not answer.shared:
                exchange.share.free()
                exchange.share.take(len(event))
            await exchange.send({"type": "http.response.body", "body": event, "more_body": True})

    telling = asyncio.ensure_future(tell())
    try:
        await asyncio.wait([gone, telling], return_when=asyncio.FIRST_COMPLETED)
        if telling.cancelled():  # it is too far behind
            exchange.line.hang_up()
            await gone
        elif telling.done():
            telling.result()
            await exchange.send({"type": "http.response.body", "body": b""})
    finally:
        gone.cancel()
        telling.cancel()
