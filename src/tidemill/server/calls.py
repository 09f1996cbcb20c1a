"""The broker seam over HTTP, for workers and producers on other machines: :mod:`.brokers.calls`.

Each call is one of the broker's, made in a thread. Calls that wait need no thread of their own, but
for owners that sleep (:mod:`.sleeps`). What the calls say, and who may make them, is told in one
table there, and in :mod:`.rights` where that depends on what is said.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.brokers.base import Broker, Feature, Filter, Page, Reply, Step, lacks
from tidemill.brokers.calls import (
    CALLS,
    KEY,
    LONGEST,
    MEDIA,
    PROTOCOL,
    SERVER,
    VERSION,
    Call,
    Hello,
    Refusal,
    encode,
)
from tidemill.brokers.calls import Role as Looks
from tidemill.brokers.carrying import lending
from tidemill.clock import new_id, wall_time
from tidemill.config import (
    LATEST,
    MAX_NAME,
    MAX_SECONDS,
    BodyTooLarge,
    check_name,
    check_size,
)
from tidemill.errors import (
    BrokerUnavailable,
    FeatureMissing,
    InvalidOption,
    StoreFull,
    TidemillError,
)
from tidemill.job import Envelope, Owner, Put
from tidemill.server.backend import Backend
from tidemill.server.budget import SMALL
from tidemill.server.edge import Exchange, require
from tidemill.server.listing import find_some
from tidemill.server.portions import Portions, look_at
from tidemill.server.rights import needed
from tidemill.server.sleeps import Sleeps
from tidemill.server.spaces import Spaces
from tidemill.server.tokens import Role
from tidemill.server.waits import Waits

__all__ = ["Calls", "routes"]

THREADS = 32
"""Calls at a time; the store has one writer anyway, and what waits for it shares its commits."""

MAX_QUEUES = 10_000
"""Queues that an owner may say it takes from."""

T = TypeVar("T")
Allow = Callable[[Scope, str], object]
Answer = tuple[int, bytes]
_KEY, _PROTOCOL = KEY.encode(), PROTOCOL.encode()
_STATUS: dict[type[TidemillError], int] = {
    BrokerUnavailable: 503,
    BodyTooLarge: 413,
    FeatureMissing: 501,
    InvalidOption: 400,
    StoreFull: 507,
}


def routes(backend: Backend) -> list[Route]:
    """Where the calls of a server's broker are, below their path."""

    def allow(scope: Scope, role: str) -> None:
        require(scope, Role[role.upper()])

    most = backend.settings.max_request
    calls = Calls(backend.mill.broker, allow, backend.stopping, most, backend.waits)
    return [Route("/{name}", calls, methods=["POST"])]


class Calls:
    """The calls of one broker. Made in the event loop that serves them.

    ``allow`` raises what is to be raised when a request may not do what a role may. A body has
    ``most`` bytes at most.
    """

    def __init__(
        self,
        broker: Broker,
        allow: Allow,
        stopping: asyncio.Event,
        most: int,
        waits: Waits | None = None,
    ) -> None:
        self._broker = broker
        self._allow = allow
        self._stopping = stopping
        self._most = most
        self._answers = Answers()
        self._threads = ThreadPoolExecutor(THREADS, "server-call")
        name = new_id()
        self._sleeps = Sleeps(broker, name, stopping)
        self._waits = waits or Waits(broker)
        self._spaces = Spaces(broker, self._threads)
        self._portions = Portions(broker)
        headers = {"content-type": MEDIA, PROTOCOL: VERSION, SERVER: name}
        self._headers = [(key.encode(), value.encode()) for key, value in headers.items()]
        self._handlers: dict[str, Callable[..., Any]] = {
            **{name: getattr(broker, name) for name in CALLS if hasattr(broker, name)},
            "attach": self._attach, "exchange": self._exchange, "find": self._find,
            "hello": self._hello, "put": self._put,
        }
        self._waits_of: dict[str, Callable[..., Coroutine[Any, Any, bytes]]] = {
            "wait": self._wait, "wait_for": self._wait_for, "wait_space": self._wait_space,
        }
        self._lacks: TidemillError | None = None
        if Feature.ELSEWHERE not in broker.features:
            self._lacks = lacks(broker.url, Feature.ELSEWHERE, "a broker over http://")

    async def close(self) -> None:
        """End what sleeps, and give up the threads."""
        await self._sleeps.close()
        await self._waits.close()
        await self._spaces.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- requests -------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""
        answer = await self._answer(scope, receive)
        if answer is None:
            return  # nobody is there any more
        status, body = answer
        exchange: Exchange | None = scope.get("tidemill.exchange")
        if exchange is not None and len(body) > SMALL:
            if CALLS[scope["path_params"]["name"]].role == Looks.VIEWER:
                exchange.share.check(len(body))
            exchange.share.at_least(len(body))
        headers = [*self._headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer | None:
        name = scope["path_params"]["name"]
        call = CALLS.get(name)
        given = dict(scope["headers"])
        version = given.get(_PROTOCOL, b"").decode("latin-1")
        if call is None or version != VERSION:
            said = f"version {version[:20]!r}" if version else "no version"
            return _refuse(
                BrokerUnavailable(
                    f"this job server keeps brokers by version {VERSION} of the protocol, and was "
                    f"asked for {name[:40]!r} in {said} of it; have both be of one release"
                )
            )
        self._allow(scope, call.role)
        body = await self._read(receive)
        if body is None:
            return None
        if len(body) > self._most:
            most = f"a call has {self._most:,} bytes at most; put fewer jobs at once"
            return _refuse(BodyTooLarge(most))
        if self._lacks is not None:
            return _refuse(self._lacks)
        if call.waits:
            return await self._waiting(call, body, receive)
        loop = asyncio.get_running_loop()
        key = given.get(_KEY, b"")
        return await loop.run_in_executor(self._threads, self._do, scope, call, body, key)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, as far as it is not too long; None when its sender went away."""
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            return bytes(message["body"])
        parts: list[bytes] = []
        size = 0
        while message["type"] == "http.request":
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body") or size > self._most:
                return b"".join(parts)
            message = await receive()
        return None

    # -- calls that wait, in the event loop -----------------------------------------------------

    async def _waiting(self, call: Call, body: bytes, receive: Receive) -> Answer:
        try:
            arguments = call.read(body)
        except msgspec.DecodeError as error:
            return _unreadable(call, error)
        arguments["timeout"] = max(0.0, min(arguments["timeout"], LONGEST))  # 0 for NaN
        try:
            return 200, await self._waits_of[call.name](receive, **arguments)
        except TidemillError as error:
            return _refuse(error)

    async def _wait(self, receive: Receive, **arguments: Any) -> bytes:
        async def gone() -> None:
            await _gone(receive)

        return encode(await self._sleeps.wait(**arguments, gone=gone))

    async def _wait_space(self, receive: Receive, queue: str, timeout: float) -> bytes:
        has_room = await self._unless_gone(self._spaces.wait(queue, timeout), receive)
        return encode(bool(has_room))

    async def _wait_for(
        self, receive: Receive, ids: Sequence[str], timeout: float, first: bool = False
    ) -> bytes:
        """Look; and again when jobs have ended, which others watch for all who wait."""
        loop = asyncio.get_running_loop()
        going_on, answer = await loop.run_in_executor(self._threads, self._look, ids)
        if going_on and timeout > 0 and not (first and len(going_on) < len(ids)):
            del answer
            waiting = self._waits.until_ended(going_on, timeout, first=first)
            await self._unless_gone(waiting, receive)
            _, answer = await loop.run_in_executor(self._threads, self._look, ids)
        return answer

    def _look(self, ids: Sequence[str]) -> tuple[list[str], bytes]:
        """Which jobs have not ended; the records of all, or of the first ones."""
        return look_at(ids, lambda some: self._broker.wait_for(some, 0.0))

    async def _unless_gone(self, waiting: Coroutine[Any, Any, T], receive: Receive) -> T | None:
        """Wait, until the client goes or the server ends."""
        wait = asyncio.ensure_future(waiting)
        ends = (_gone(receive), self._stopping.wait())
        others: list[asyncio.Future[Any]] = [asyncio.ensure_future(end) for end in ends]
        try:
            await asyncio.wait([wait, *others], return_when=asyncio.FIRST_COMPLETED)
            return wait.result() if wait.done() else None
        finally:
            for task in (wait, *others):
                task.cancel()

    # -- in threads -----------------------------------------------------------------------------

    def _do(self, scope: Scope, call: Call, body: bytes, key: bytes) -> Answer:
        try:
            arguments = call.read(body)
            self._allow(scope, needed(self._broker, call.name, arguments))
        except msgspec.DecodeError as error:
            return _unreadable(call, error)
        except TidemillError as error:
            return _refuse(error)

        def do() -> Answer:
            try:
                return 200, encode(self._handlers[call.name](**arguments))
            except TidemillError as error:
                return _refuse(error)

        return self._answers.once(key, do) if call.once and key else do()

    def _hello(self) -> Hello:
        features = [str(feature) for feature in self._broker.features]
        lends = Feature.CARRY in self._broker.features
        return Hello(features, self._most, lending(self._broker).identity if lends else "")

    def _attach(self, owner: Owner) -> None:
        if not 1 <= owner.lease <= 86400:
            raise InvalidOption(
                f"the lease of an owner elsewhere must be 1 to 86400 seconds, not {owner.lease:g}"
            )
        _check_owner(owner)
        # Files of this machine are none of its business.
        self._broker.attach(msgspec.structs.replace(owner, board=""))

    def _exchange(self, step: Step) -> Reply:
        for verdict in step.verdicts:
            _check_seconds("the delay of a verdict", verdict.delay)
            _check(verdict.followers)
        for _, seconds in step.touch:
            _check_seconds("the time of a touch", seconds)
        self._sleeps.exchanges(step.owner)
        reply = self._portions.exchange(step)
        if reply.schedules and not reply.wall:
            reply.wall = wall_time()  # they are due by the clock of this machine
        return reply

    def _find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        return find_some(self._broker.find, what, limit, cursor)

    def _put(self, jobs: Sequence[Envelope], **more: Any) -> list[Put]:
        _check(jobs)
        return self._broker.put(jobs, **more)


class Answers:
    """The answers to calls that were done, in case they are repeated."""

    MOST = 10_000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Future[Answer]] = OrderedDict()

    def once(self, key: bytes, do: Callable[[], Answer]) -> Answer:
        """Do it, or wait for the answer of who does it, or has done it."""
        mine: Future[Answer] = Future()
        with self._lock:
            known = self._known.setdefault(key, mine)
            if len(self._known) > self.MOST:
                self._known.popitem(last=False)
        if known is not mine:
            return known.result()
        try:
            answer = do()
        except BaseException as error:
            self._forget(key)
            mine.set_exception(error)
            raise
        if answer[0] == _STATUS[BrokerUnavailable]:  # it may yet be done
            self._forget(key)
        mine.set_result(answer)
        return answer

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._known.pop(key, None)


_MOST = {
    "rank": 2**32 - 1,
    "delay": MAX_SECONDS,
    "timeout": MAX_SECONDS,
    **dict.fromkeys(("at", "created", "expires"), LATEST),
}
"""Of each number in a job: workers and producers send what they have checked themselves."""


async def _gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _check(jobs: Sequence[Envelope]) -> None:
    """Refuse names and times that no store keeps, and bodies that are too large."""
    for job in jobs:
        if not (job.id and job.queue):
            raise InvalidOption("a job has an id and a queue")
        for name in (job.id, job.queue, job.task, job.key):
            if len(name) * 4 > MAX_NAME and len(name.encode()) > MAX_NAME:
                raise InvalidOption(f"the name {name[:40]!r}… has more than {MAX_NAME} bytes")
        for what, most in _MOST.items():
            value = getattr(job, what)
            if not 0 <= value <= most:  # nor is NaN
                raise InvalidOption(f"the {what} of a job must be 0 to {most:.0f}, not {value}")
        check_size(job.body, job.headers, job.tags)


def _check_owner(owner: Owner) -> None:
    """Refuse names that no list of owners is to show."""
    check_name("the id of an owner", owner.id)
    for what, name in [("kind", owner.kind), ("name", owner.name), ("host", owner.host)]:
        if name:
            check_name(f"the {what} of an owner", name)
    if len(owner.queues) > MAX_QUEUES:
        raise InvalidOption(f"an owner has {MAX_QUEUES:,} queues at most, not {len(owner.queues)}")
    for name in owner.queues:
        check_name("a queue of an owner", name)


def _check_seconds(what: str, seconds: float) -> None:
    """Refuse what no clock of a store could hold."""
    if not 0 <= seconds <= MAX_SECONDS:  # nor is NaN
        raise InvalidOption(f"{what} must be 0 to {MAX_SECONDS:.0f} seconds, not {seconds}")


def _refuse(error: TidemillError) -> Answer:
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 409)
    return status, encode(Refusal.of(error))


def _unreadable(call: Call, error: msgspec.DecodeError) -> Answer:
    return _refuse(InvalidOption(f"the arguments of {call.name} cannot be read: {error}"))
