"""An exchange: one request on its way through the server, and the answer to it.

All requests and answers of one server share a budget of memory: a bound for each request would be
multiplied by the number of connections. An answer counts until its client has taken it.
"""

from __future__ import annotations

import asyncio
import os
import re

from starlette.types import Message, Receive, Scope, Send

from tidemill.server.http.problems import Problem
from tidemill.server.settings import Settings
from tidemill.server.tokens import Role, Token

_VALID_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,100}")
_HEADERS = frozenset(
    b"host origin sec-fetch-site authorization x-request-id accept cookie content-encoding "
    b"content-length content-type transfer-encoding".split()
)
_LISTS = frozenset({b"accept", b"content-encoding", b"transfer-encoding"})
"""Headers that a request may repeat. All others of these headers have one value."""


SMALL = 64 * 1024  # bytes up to which a body or an answer does not count


class MemoryBudget:
    """The bytes in use, at most ``most``. Used in the event loop only."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0


class ClientGone(Exception):
    """The client went away before its answer; no answer is possible."""


class Exchange:
    """One request and its answer, within the bounds of the settings.

    ``name``, ``role`` and ``token`` describe the client, once it is authenticated; ``known`` is
    True from then on.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, settings: Settings, budget: MemoryBudget
    ) -> None:
        self.scope = scope
        self.settings = settings
        self._budget = budget
        self._held = 0  # bytes of the budget
        self._receive = receive
        self._send = send
        self.status = 0
        self.started = False
        self.name = ""
        self.role = Role.ADMIN
        self.token: Token | None = None
        self.known = False
        self.acts = False  # an act of an operator has begun
        self._size = 0
        self._is_read = False  # the whole body was received
        self._read_until = asyncio.get_running_loop().time() + settings.body_timeout
        self._leaving: asyncio.Task[None] | None = None
        self._repeated = b""
        self._headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in _HEADERS:
                before = self._headers.get(name)
                if before is not None and name not in _LISTS:
                    self._repeated = name
                self._headers[name] = value if before is None else before + b", " + value
        request_id = self._headers.get(b"x-request-id", b"")
        is_valid = _VALID_ID.fullmatch(request_id)
        self.id = request_id.decode() if is_valid else os.urandom(8).hex()
        self.content_type = self.header(b"content-type")

    def header(self, name: bytes) -> str:
        """A header of the request; empty when the request does not have it."""
        return self._headers.get(name, b"").decode("latin-1")

    @property
    def accept(self) -> bytes:
        return self._headers.get(b"accept", b"")

    @property
    def address(self) -> str:
        client = self.scope.get("client")
        return client[0] if client else "-"

    def hold(self, size: int, *, check: bool = True) -> None:
        """Use ``size`` bytes of the budget until ``release``; a finished call is not checked."""
        budget, more = self._budget, max(0, size - self._held)
        if check and budget.held + more > budget.most:
            raise Problem(
                "busy",
                f"requests and answers use {budget.held:,} of the {budget.most:,} bytes of memory "
                "that the server may use; try again later, or start the server with a larger "
                "--max-memory",
                headers={"retry-after": "1"},
            )
        self._held += more
        budget.held += more

    def release(self) -> None:
        self._budget.held -= self._held
        self._held = 0

    # -- reading the body -------------------------------------------------------------------------

    def check(self) -> None:
        """Check the headers. A proxy in front may have read another value of a repeated header."""
        if self._repeated:
            name = self._repeated.decode()
            raise Problem("invalid-request", f"the request has the header {name} twice; send one")
        length = self.header(b"content-length")
        if length.isdigit() and int(length) > self.settings.max_request:
            raise self._too_large()
        coding = self.header(b"content-encoding")
        has_body = length.strip("0") or self.header(b"transfer-encoding")
        if has_body and coding.lower() not in ("", "identity"):
            raise Problem(
                "unsupported-media-type",
                f"the Content-Encoding {coding[:100]} is not supported; send the body "
                "uncompressed, without this header",
                headers={"accept-encoding": "identity"},
            )

    def _too_large(self) -> Problem:
        return Problem(
            "too-large",
            f"the body has more than {self.settings.max_request:,} bytes, the maximum; "
            "send it in several requests, or start the server with a larger --max-request",
        )  # the connection stays open: a client that still sends would miss the answer

    async def receive(self) -> Message:
        """The next part of the body, or the message that the client went away."""
        if self._is_read:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._read_until):
                message = await self._receive()
        except TimeoutError:
            raise Problem(
                "timeout",
                "the body did not come in time; send it again",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.request":
            self._is_read = not message.get("more_body")
            self._size += len(message.get("body", b""))
            if self._size > self.settings.max_request:
                raise self._too_large()
            if self._size > SMALL:
                self.hold(self._size)
        return message

    async def body(self) -> bytes:
        parts: list[bytes] = []
        while (message := await self.receive())["type"] == "http.request":
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)
        raise ClientGone

    def leaving(self) -> asyncio.Task[None]:
        """A task that ends when the client leaves. Call it only after the body was read."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(client_gone(self._receive))
        return self._leaving

    @property
    def has_left(self) -> bool:
        """True when the client has left, and since then :meth:`leaving` was called."""
        # A connection that closes drops what is written, before the task of leaving() ends.
        closes = self.scope.get("tidemill.is_closing")
        return self._leaving is not None and (
            self._leaving.done() or (closes is not None and closes())
        )

    def end(self) -> None:
        self.release()
        if self._leaving is not None:
            self._leaving.cancel()

    # -- sending the answer -----------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Send a part of the answer. A large part goes in pieces, one after the other."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = [(b"x-request-id", self.id.encode()), *message.get("headers", ())]
            message = {**message, "headers": headers}
        elif len(body := message.get("body", b"")) > SMALL:
            at = 0
            while len(body) - at > SMALL:
                piece = body[at : at + SMALL]
                await self._send_in_time({**message, "body": piece, "more_body": True})
                at += SMALL
            message = {**message, "body": body[at:]}
        await self._send_in_time(message)

    async def _send_in_time(self, message: Message) -> None:
        """Send a message; end the exchange if the client takes no bytes for long."""
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                await self._send(message)
        except TimeoutError:
            if abort := self.scope.get("tidemill.abort"):
                abort()  # an ordinary close would wait for the client to take the rest
            raise ClientGone from None

    async def answer(
        self, status: int, body: bytes, media: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.started = True
        self.status = status
        sent = [
            (b"content-type", media),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.id.encode()),
        ]
        if headers:
            sent += [(k.encode(), v.encode("latin-1", "replace")) for k, v in headers.items()]
        if status == 204:
            del sent[:2]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})
        if len(body) > SMALL:
            self.hold(len(body), check=False)
            await self.send({"type": "http.response.body", "body": body})
            return
        await self._send({"type": "http.response.body", "body": body})


async def client_gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def require(scope: Scope, role: Role, *, whole: bool = True) -> Exchange:
    """The exchange of a client with the role; ``whole`` refuses tokens for some queues."""
    exchange: Exchange = scope["tidemill.exchange"]
    if exchange.role < role:
        client = (
            f"the token {exchange.name!r}" if exchange.name else "a certificate without a token"
        )
        raise Problem(
            "forbidden",
            f"this needs the role {role.name.lower()}; {client} has the role "
            f"{exchange.role.name.lower()}",
        )
    if whole and exchange.token is not None and exchange.token.queues:
        raise Problem(
            "forbidden",
            f"the token {exchange.name!r} is for some queues only, and this concerns the whole "
            "store; use a token without --queue",
        )
    return exchange
