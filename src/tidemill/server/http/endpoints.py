"""Endpoints: declare the calls of the JSON API, find a call by its path, and read its request.

An :class:`Endpoint` names a method, a path and a function. The annotations of the function declare
its result and its parameters. The OpenAPI description (:mod:`.openapi`) is made from the
annotations. The parameters are:

    a name in braces in the path   text, one segment of the path (``%2F`` is not a separator)
    ``query``                      a struct, one field for each query parameter
    ``body``                       a struct as JSON, or ``Raw`` for any bytes
    ``call``                       the call itself, for everything else
"""

from __future__ import annotations

import asyncio
import inspect
import typing
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Scope

from tidemill.core.job import Record
from tidemill.server.http.backend import Backend
from tidemill.server.http.bodies import DECODE_LARGE
from tidemill.server.http.exchange import SMALL, Exchange, require
from tidemill.server.http.problems import Problem, not_allowed
from tidemill.server.http.queue_permissions import allowed_queues, check_path
from tidemill.server.http.receipts import Receipt, parse, sealed
from tidemill.server.http.schemas.rules import NEVER_EMPTY
from tidemill.server.http.validation_errors import validation_message
from tidemill.server.tokens import Role

_PLAIN_TYPES = ("", "application/json", "text/json")

_UNKNOWN = "unknown field {:.80} in the {}; this call takes no fields there"


# -- calls -----------------------------------------------------------------------------------------


T = TypeVar("T")

LARGE = 256 * 1024
"""A body of more bytes is parsed in a thread, so that the event loop serves other clients."""


class Stream(msgspec.Struct):
    """Server-sent events. With ``shared`` all listeners get the same bytes, kept once."""

    events: AsyncIterator[bytes]
    shared: bool = False


class Call:
    """One call of an endpoint. ``status`` is the status of its answer, and may be changed."""

    def __init__(self, backend: Backend, exchange: Exchange, status: int) -> None:
        self.backend = backend
        self.exchange = exchange
        self.status = status
        self.has_turn = False

    @property
    def sees_arguments(self) -> bool:
        return self.exchange.role >= Role[self.backend.settings.see_arguments.upper()]

    def shown(self, record: Record) -> Record:
        """A record as the client may see it."""
        return record if self.sees_arguments else record.without_values()

    # -- large bodies: one at a time, since a decoded body may be many times larger ---------------

    async def compute(self, function: Callable[[], T], size: int) -> T:
        """Call a function that handles ``size`` bytes; in a thread when they are many."""
        if size <= LARGE and not self.has_turn:
            return function()
        await self._take_turn()
        try:
            return await self.backend.run(function)
        finally:
            self.end_turn()

    async def decode_large(
        self, decode: Callable[[bytes], Any], data: bytes, *, keep_turn: bool
    ) -> Any:
        """Decode a large body in a thread. With ``keep_turn`` keep the turn for :meth:`compute`."""
        await self._take_turn()
        try:
            return await self.backend.run(decode, data)
        finally:
            if not keep_turn:
                self.end_turn()

    async def _take_turn(self) -> None:
        if not self.has_turn:
            await self.backend.large_body.acquire()
            self.has_turn = True

    def end_turn(self) -> None:
        """Let the next large body be handled; does nothing without a turn."""
        if self.has_turn:
            self.has_turn = False
            self.backend.large_body.release()

    # -- receipts ---------------------------------------------------------------------------------

    def sealed(self, receipt: str) -> str:
        return sealed(receipt, self._secret) if self._secret else receipt

    def parse(self, receipt: str) -> Receipt:
        return parse(receipt, self._secret)

    @property
    def _secret(self) -> str:
        """The key that seals receipts of a token for some queues; empty for all other clients."""
        token = self.exchange.token
        return token.sha256 if token is not None and token.queues else ""


async def send_answer(call: Call, result: Any) -> None:
    """Answer a call: nothing, a stream of events, or any struct as JSON."""
    exchange = call.exchange
    if isinstance(result, Stream):
        await _send_events(call, result)
    elif result is None:
        await exchange.answer(204, b"", b"")
    else:
        data = msgspec.json.encode(result)
        if len(data) > SMALL and exchange.scope["method"] == "GET":
            exchange.hold(len(data))
        await exchange.answer(call.status, data, b"application/json")


async def _send_events(call: Call, stream: Stream) -> None:
    """Send events until they end, the client goes away, or the server ends."""
    exchange = call.exchange
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    if exchange.scope["method"] == "HEAD":  # the client would wait for an end that never comes
        await exchange.send({"type": "http.response.body", "body": b""})
        return
    leaving = exchange.leaving()

    async def send_all() -> None:
        async for event in stream.events:
            if len(event) > SMALL and not stream.shared:
                exchange.release()
                exchange.hold(len(event))
            await exchange.send({"type": "http.response.body", "body": event, "more_body": True})

    sending = asyncio.ensure_future(send_all())
    try:
        await asyncio.wait([leaving, sending], return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
            await exchange.send({"type": "http.response.body", "body": b""})
    finally:
        sending.cancel()


class Raw(msgspec.Struct):
    """A body as it was sent, with its Content-Type."""

    data: bytes
    content_type: str


class Endpoint:
    """One method on one path.

    Args:
        handler: the function; its docstring describes the endpoint, first in one line.
        role: the role that a client needs; by default viewers may read, and operators the rest.
        status: the status of a successful answer; by default 204 without a result, else 200.
        also: further statuses.
        checks_queues: the handler itself checks which queues a token may use.
        audit: the act of an operator, in the words of the audit list; empty for other calls.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Callable[..., Awaitable[Any]],
        role: Role | None = None,
        *,
        status: int = 0,
        also: Sequence[int] = (),
        checks_queues: bool = False,
        audit: str = "",
    ) -> None:
        self.method = method
        self.path = path
        self.handler = handler
        self.role = role or (Role.VIEWER if method == "GET" else Role.OPERATOR)
        self.also = also
        self.checks_queues = checks_queues
        self.audit = audit
        hints = typing.get_type_hints(handler)
        self.answer = hints.pop("return")
        self.status = status or (204 if self.answer is type(None) else 200)
        self.query = hints.get("query")
        self.body = hints.get("body")
        self.decode_large = DECODE_LARGE.get(self.body)
        self.names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        self.takes = tuple(inspect.signature(handler).parameters)
        assert set(self.takes) <= {"call", "query", "body", *self.names}, path
        if self.body is not None and self.body is not Raw:
            self._decode_small: Any = msgspec.json.Decoder(self.body).decode
        fields = msgspec.structs.fields(self.query) if self.query else ()
        self._lists = {field.encode_name for field in fields if "list[" in str(field.type)}
        self._no_texts = {field.encode_name for field in fields if "str" not in str(field.type)}

    @property
    def may_be_empty(self) -> bool:
        """Whether a request may have no body; never when it creates or changes something."""
        if self.status == 201 or self.method == "PATCH":
            return False
        body = self.body or Raw
        needed = any(field.required for field in msgspec.structs.fields(body))
        return not needed and body.__name__ not in NEVER_EMPTY

    async def read(self, call: Call, values: Sequence[str]) -> dict[str, Any]:
        arguments: dict[str, Any] = dict(zip(self.names, values, strict=True))
        if "call" in self.takes:
            arguments["call"] = call
        if self.query is not None:
            arguments["query"] = self._read_query(call.exchange)
        else:
            _refuse_query(call.exchange)
        if self.body is not None:
            arguments["body"] = await self._read_body(call)
        elif self.method != "GET":
            _refuse_fields(await call.exchange.body())
        return arguments

    async def _read_body(self, call: Call) -> Any:
        if self.body is Raw:
            return Raw(await call.exchange.body(), call.exchange.content_type)
        data = await self._json_body(call.exchange)
        if len(data) <= LARGE:
            return self._decode(data)
        return await call.decode_large(self._decode, data, keep_turn=bool(self.decode_large))

    async def _json_body(self, exchange: Exchange) -> bytes:
        kind = exchange.content_type.partition(";")[0].strip().lower()
        if kind not in _PLAIN_TYPES and not kind.endswith("+json"):
            raise Problem(
                "unsupported-media-type",
                f"the body must be JSON with Content-Type: application/json, not {kind[:100]}; "
                "curl sends this with --json",
            )
        return await exchange.body()

    def _decode(self, data: bytes) -> Any:
        if not data:
            if not self.may_be_empty:
                raise Problem("invalid-request", "the body is empty; it must be JSON")
            try:
                return msgspec.convert({}, self.body)
            except msgspec.ValidationError:
                raise Problem("invalid-request", "the body is empty; it must be JSON") from None
        try:
            large = self.decode_large if len(data) > LARGE else None
            return json_of(data, large or self._decode_small)
        except msgspec.ValidationError as error:
            raise Problem("invalid-request", validation_message(error, self.body)) from None

    def _read_query(self, exchange: Exchange) -> Any:
        text = exchange.scope.get("query_string", b"").decode("latin-1")
        try:
            pairs = urllib.parse.parse_qsl(text, keep_blank_values=True, errors="strict")
        except ValueError:
            raise Problem(
                "invalid-request", "the query must have the form name=value&…, in UTF-8"
            ) from None
        fields: dict[str, Any] = {}
        for name, value in pairs:
            if name in self._no_texts and value.lower() == "null":  # msgspec would read None
                raise Problem("invalid-request", f"{name}: must not be null; leave it out")
            if name in self._lists:
                fields.setdefault(name, []).append(value)
            elif name in fields:
                raise Problem("invalid-request", f"{name}: is given twice")
            else:
                fields[name] = value
        try:
            return msgspec.convert(fields, self.query, strict=False)
        except msgspec.ValidationError as error:
            raise Problem("invalid-request", validation_message(error, self.query)) from None


def _refuse_query(exchange: Exchange) -> None:
    if text := exchange.scope.get("query_string"):
        name = text.decode("latin-1").partition("=")[0]
        raise Problem("invalid-request", _UNKNOWN.format(name, "query"))


def _refuse_fields(data: bytes) -> None:
    """Refuse the body of a call that takes no body, unless the body is an empty object."""
    if not data:
        return
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Problem("invalid-request", "this call takes no body") from None
    if fields:
        raise Problem("invalid-request", _UNKNOWN.format(next(iter(fields)), "body"))


def json_of(data: bytes, decode: Callable[[bytes], Any] = msgspec.json.decode) -> Any:
    try:
        return decode(data)
    except UnicodeDecodeError as error:
        raise Problem(
            "invalid-request", f"the body is not UTF-8, as JSON must be: {error.reason}"
        ) from None


class Endpoints:
    """All endpoints of a server, by path and method."""

    def __init__(self, backend: Backend, endpoints: Sequence[Endpoint]) -> None:
        self.backend = backend
        self._tree: dict[Any, Any] = {}
        for endpoint in endpoints:
            node = self._tree
            for part in endpoint.path.strip("/").split("/"):
                node = node.setdefault(None if part.startswith("{") else part, {})
            node.setdefault("", {})[endpoint.method] = endpoint

    def route(self, scope: Scope) -> tuple[Endpoint | None, list[str]]:
        """The endpoint of a request, and the values in its path; None when the path is unknown."""
        found = self._find(scope.get("raw_path") or scope["path"].encode())
        if not found:
            return None, []
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        for methods, values in found:
            if method in methods:
                return methods[method], values
        raise not_allowed({name: one for methods, _ in found for name, one in methods.items()})

    def _find(self, path: bytes) -> list[tuple[dict[str, Endpoint], list[str]]]:
        """The methods and values of each path that fits: a job may have the id ``cancel``."""
        nodes: list[tuple[dict[Any, Any], list[str]]] = [(self._tree, [])]
        for part in path.decode("latin-1").strip("/").split("/"):
            if not part:
                return []
            fixed = [(node[part], values) for node, values in nodes if part in node]
            named = [(node[None], values) for node, values in nodes if None in node]
            nodes = fixed + [(node, [*values, _unquoted(part)]) for node, values in named]
        return [(node[""], values) for node, values in nodes if "" in node]

    async def authorize(
        self, endpoint: Endpoint, exchange: Exchange, values: Sequence[str]
    ) -> None:
        require(exchange.scope, endpoint.role, whole=False)
        if allowed_queues(exchange):
            known = endpoint.checks_queues
            await check_path(self.backend, exchange, endpoint.names, values, known)


def _unquoted(part: str) -> str:
    try:
        return urllib.parse.unquote(part, errors="strict") if "%" in part else part
    except ValueError:
        raise Problem("invalid-request", f"the path part {part[:60]!r} is not UTF-8") from None
