"""The broker contract over HTTP, for workers and producers on other machines.

One table lists the calls, with their arguments and the role that each needs
(:mod:`tidemill.brokers.contract.rpc`). Each call of the broker is made in a thread. Calls that wait
share threads (:mod:`.waits`).

A worker has an operator's token, and declares limits and schedules with calls that also change them
by hand, which needs an admin. :func:`needed` tells the two apart where it can; see
``docs/brokers/http.md``. Only an admin may act for a shared owner: many clients have its jobs.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.brokers.contract import rpc
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import HistoryRow, check_rows
from tidemill.brokers.contract.inspection import HOLDS, Filter, Page
from tidemill.brokers.contract.rpc import Role as CallRole
from tidemill.brokers.contract.schedules import LAST_OWN, Change
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import new_id
from tidemill.core.codec import BodyTooLarge, check_size
from tidemill.core.config import LATEST, MAX_NAME, MAX_SECONDS, check_name
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner, Put
from tidemill.errors import (
    BrokerUnavailable,
    CodecError,
    FeatureMissing,
    InvalidOption,
    StoreFull,
    TidemillError,
)
from tidemill.schedules.record import decode
from tidemill.server.http.answer_size import SizedExchanges, find_some, records_that_fit
from tidemill.server.http.backend import Backend
from tidemill.server.http.exchange import SMALL, Exchange, client_gone, require
from tidemill.server.http.receipts import is_server_owner
from tidemill.server.http.waits import ParkedWaits, Presence, Waits, until_first
from tidemill.server.tokens import Role

THREADS = 32
"""Calls at a time; more are no faster, since the store has one writer and calls share commits."""

T = TypeVar("T")
Allow = Callable[[Scope, str], object]
Answer = tuple[int, bytes]
_KEY, _PROTOCOL = rpc.KEY.encode(), rpc.PROTOCOL.encode()
_STATUS: dict[type[TidemillError], int] = {
    BrokerUnavailable: 503,
    BodyTooLarge: 413,
    FeatureMissing: 501,
    InvalidOption: 400,
    StoreFull: 507,
}


def routes(backend: Backend) -> list[Route]:
    def allow(scope: Scope, role: str) -> None:
        require(scope, Role[role.upper()])

    calls = BrokerRpc(
        backend.mill.broker,
        allow,
        backend.stopping,
        backend.settings.max_request,
        backend.waits,
        hides=backend.settings.see_arguments != CallRole.VIEWER,
    )
    return [Route("/{name}", calls, methods=["POST"])]


class BrokerRpc:
    """The calls of one broker. Made in the event loop that serves them.

    ``allow`` raises an error for a request without the role. A body has at most ``max_bytes``. With
    ``hides``, calls that show arguments of jobs need an operator, who may act for any worker.
    """

    def __init__(
        self,
        broker: Store,
        allow: Allow,
        stopping: asyncio.Event,
        max_bytes: int,
        waits: Waits | None = None,
        *,
        hides: bool = False,
    ) -> None:
        self._broker = broker
        self._hides = hides
        self._allow = allow
        self._stopping = stopping
        self._max_bytes = max_bytes
        self._answers = ReplyCache()
        self._threads = ThreadPoolExecutor(THREADS, "server-call")
        name = new_id()
        self._parked_waits = ParkedWaits(broker, name, stopping)
        self._presence = Presence(broker, stopping)
        self._waits = waits or Waits(broker)
        self._sized_exchanges = SizedExchanges(broker)
        headers = {"content-type": rpc.MEDIA, rpc.PROTOCOL: rpc.VERSION, rpc.SERVER: name}
        self._headers = [(key.encode(), value.encode()) for key, value in headers.items()]
        self._handlers: dict[str, Callable[..., Any]] = {
            **{name: getattr(broker, name) for name in rpc.CALLS if hasattr(broker, name)},
            "alter": self._alter,
            "attach": self._attach,
            "exchange": self._exchange,
            "find": self._find,
            "hello": self._hello,
            "put": self._put,
            "keep_history": self._keep_history,
        }
        self._waits_of: dict[str, Callable[..., Coroutine[Any, Any, bytes]]] = {
            "wait": self._wait,
            "present": self._present,
            "wait_for": self._wait_for,
            "wait_space": self._wait_space,
        }
        has_feature = Feature.REMOTE_OWNERS in broker.features
        lack = lacks(broker.url, Feature.REMOTE_OWNERS, "a broker over http://")
        self._missing_feature = None if has_feature else lack

    async def close(self) -> None:
        self._presence.close()
        await self._parked_waits.close()
        await self._waits.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- requests -------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(scope, receive)
        if answer is None:
            return  # the client has left
        status, body = answer
        exchange: Exchange | None = scope.get("tidemill.exchange")
        if exchange is not None and len(body) > SMALL:
            reads = rpc.CALLS[scope["path_params"]["name"]].role == CallRole.VIEWER
            exchange.hold(len(body), check=reads)
        headers = [*self._headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer | None:
        name = scope["path_params"]["name"]
        call = rpc.CALLS.get(name)
        given = dict(scope["headers"])
        version = given.get(_PROTOCOL, b"").decode("latin-1")
        if call is None or version != rpc.VERSION:
            version_text = f"version {version[:20]!r}" if version else "no version"
            return _refuse(
                BrokerUnavailable(
                    f"this job server speaks version {rpc.VERSION} of the broker protocol; the "
                    f"request was for {name[:40]!r} in {version_text}. Use the same tidemill "
                    "release on both sides"
                )
            )
        hidden = self._hides and call.shows and call.role == CallRole.VIEWER
        self._allow(scope, CallRole.OPERATOR if hidden else call.role)
        body = await self._read(receive)
        if body is None:
            return None
        if len(body) > self._max_bytes:
            text = f"a call may have at most {self._max_bytes:,} bytes; put fewer jobs at once"
            return _refuse(BodyTooLarge(text))
        if self._missing_feature is not None:
            return _refuse(self._missing_feature)
        if call.waits:
            return await self._waiting(call, body, receive)
        loop = asyncio.get_running_loop()
        key = given.get(_KEY, b"")
        return await loop.run_in_executor(self._threads, self._do, scope, call, body, key)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; a body beyond the bound is cut off. None when the client went away."""
        parts: list[bytes] = []
        size = 0
        while (message := await receive())["type"] == "http.request":
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body") or size > self._max_bytes:
                return b"".join(parts)
        return None

    # -- calls that wait, in the event loop -----------------------------------------------------

    async def _waiting(self, call: rpc.Call, body: bytes, receive: Receive) -> Answer:
        try:
            arguments = _read(call, body)
            arguments["timeout"] = max(0.0, min(arguments["timeout"], rpc.LONGEST))  # NaN becomes 0
            return 200, await self._waits_of[call.name](receive, **arguments)
        except TidemillError as error:
            return _refuse(error)

    async def _wait(self, receive: Receive, **arguments: Any) -> bytes:
        gone = functools.partial(client_gone, receive)
        return rpc.encode(await self._parked_waits.wait(**arguments, gone=gone))

    async def _present(self, receive: Receive, owner_ids: list[str], timeout: float) -> bytes:
        gone = functools.partial(client_gone, receive)
        return rpc.encode(await self._presence.wait(owner_ids, timeout, gone))

    async def _wait_space(self, receive: Receive, queue: str, timeout: float) -> bytes:
        waiting = self._waits.until_room(queue, timeout)
        return rpc.encode(bool(await self._unless_client_leaves(waiting, receive)))

    async def _wait_for(
        self, receive: Receive, ids: Sequence[str], timeout: float, first: bool = False
    ) -> bytes:
        """The records of jobs, all read again after a wait."""
        loop = asyncio.get_running_loop()
        unfinished, answer = await loop.run_in_executor(self._threads, self._records, ids)
        if unfinished and timeout > 0 and not (first and len(unfinished) < len(ids)):
            del answer
            waiting = self._waits.until_ended(unfinished, timeout, first=first)
            await self._unless_client_leaves(waiting, receive)
            _, answer = await loop.run_in_executor(self._threads, self._records, ids)
        return answer

    def _records(self, ids: Sequence[str]) -> tuple[list[str], bytes]:
        """The ids of unfinished jobs, and the encoded records of the first jobs."""
        return records_that_fit(ids, lambda some: self._broker.wait_for(some, 0.0))

    async def _unless_client_leaves(
        self, waiting: Coroutine[Any, Any, T], receive: Receive
    ) -> T | None:
        """The result of a wait; None when the client leaves or the server shuts down first."""
        wait = asyncio.ensure_future(waiting)
        try:
            await until_first(client_gone(receive), self._stopping, wait)
            return wait.result() if wait.done() else None
        finally:
            wait.cancel()

    # -- in threads -----------------------------------------------------------------------------

    def _do(self, scope: Scope, call: rpc.Call, body: bytes, key: bytes) -> Answer:
        try:
            arguments = _read(call, body)
            self._allow(scope, needed(self._broker, call.name, arguments))
        except TidemillError as error:
            return _refuse(error)

        def do() -> Answer:
            try:
                return 200, rpc.encode(self._handlers[call.name](**arguments))
            except TidemillError as error:
                return _refuse(error)

        return self._answers.once(key, do) if call.once and key else do()

    def _hello(self) -> rpc.Hello:
        features = [str(feature) for feature in self._broker.features]
        return rpc.Hello(features, self._max_bytes, self._broker.identity)

    def _attach(self, owner: Owner) -> None:
        if not 1 <= owner.lease <= 86400:
            raise InvalidOption(
                f"the lease of a remote owner must be 1 to 86400 seconds, not {owner.lease:g}"
            )
        check_owner(owner)
        # The store must not read a scoreboard file that a remote owner names.
        self._broker.attach(msgspec.structs.replace(owner, board=""))

    def _exchange(self, step: Step) -> Reply:
        for verdict in step.verdicts:
            check_seconds("the delay of a verdict", verdict.delay)
            check_jobs(verdict.followers)
        for _, seconds in step.touch:
            check_seconds("the time of a touch", seconds)
        check_rows(step.history)
        self._parked_waits.exchanges(step.owner)
        return self._sized_exchanges.exchange(step)

    def _find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        return find_some(self._broker.find, what, limit, cursor)

    def _put(self, jobs: Sequence[Envelope], **more: Any) -> list[Put]:
        check_jobs(jobs)
        return self._broker.put(jobs, **more)

    def _alter(self, job_ids: list[str], rank: int | None, queue: str | None) -> list[bool]:
        if rank is not None and not 0 <= rank <= _BOUNDS["rank"]:
            raise InvalidOption(f"the rank of a job must be 0 to {_BOUNDS['rank']:.0f}, not {rank}")
        if queue is not None:
            check_name("queue", queue)
        return self._broker.alter(job_ids, rank=rank, queue=queue)

    def _keep_history(self, rows: Sequence[HistoryRow]) -> None:
        check_rows(rows)
        with_history(self._broker, "keep_history").keep_history(rows)


class ReplyCache:
    """The answers to the latest calls, for calls that are repeated."""

    MOST = 10_000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Future[Answer]] = OrderedDict()

    def once(self, key: bytes, do: Callable[[], Answer]) -> Answer:
        """The answer to the call with this key; the call is made at most once."""
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
        if answer[0] == _STATUS[BrokerUnavailable]:  # a repetition makes the call again
            self._forget(key)
        mine.set_result(answer)
        return answer

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._known.pop(key, None)


def _refuse(error: TidemillError) -> Answer:
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 409)
    return status, rpc.encode(rpc.Refusal.of(error))


def _read(call: rpc.Call, body: bytes) -> dict[str, Any]:
    try:
        return call.read(body)
    except msgspec.DecodeError as error:
        raise InvalidOption(f"the arguments of {call.name} cannot be read: {error}") from None


# -- checks of the needed role, and of the values of arguments -------------------------------------


MAX_QUEUES = 10_000  # queues that an owner may list

_BOUNDS = {
    "rank": 2**32 - 1,
    "delay": MAX_SECONDS,
    "timeout": MAX_SECONDS,
    **dict.fromkeys(("at", "created", "expires"), LATEST),
}
"""The highest value of each number in a job. Clients check these before they send a job."""


def needed(broker: Store, name: str, arguments: dict[str, Any]) -> str:
    """The role that a call needs with these arguments."""
    by_hand = False
    if name == "set_limit":
        by_hand = not arguments["declared"] or arguments["terms"] is None
    elif name == "change_schedules":
        by_hand = any(_is_by_hand(broker, change) for change in arguments["changes"])
    elif name in ("detach", "release"):
        owner_id = arguments["owner_id"]
        by_hand = is_server_owner(owner_id) or any(
            owner.id == owner_id and not owner.lease for owner in broker.owners()
        )
    elif name == "cancel":
        by_hand = bool(arguments["purge"])
    elif name == "forget_queue":
        by_hand = not arguments["queue"].startswith(HOLDS)  # clients delete queues of ended holds
    elif name == "attach":
        by_hand = is_server_owner(arguments["owner"].id)
    elif name == "exchange":
        by_hand = is_server_owner(arguments["step"].owner)
    elif name == "command":
        by_hand = is_server_owner(arguments["owner_id"])
    return CallRole.ADMIN if by_hand else rpc.CALLS[name].role


def _is_by_hand(broker: Store, change: Change) -> bool:
    """Whether a change adds a schedule that no code declares, or removes a schedule that fires."""
    if change.name < LAST_OWN:
        return False  # a declaration of a task, a binding of a queue, or a note
    try:
        if not change.gone:
            return not change.expect and not decode(change.body).code
        if change.jobs:
            return False  # the schedule puts its last jobs
        (record,) = broker.schedules([change.name])
        if record is None or record.version != change.expect:
            return False  # nothing is changed
        was = decode(record.body)
        # A worker removes schedules that no code declares any more. An operator may resume a paused
        # schedule, which may then end.
        return not (was.paused if change.body else was.undeclared)
    except CodecError:
        return True


def check_jobs(jobs: Sequence[Envelope]) -> None:
    """Refuse names and times that a store cannot keep, and bodies that are too large."""
    for job in jobs:
        if not (job.id and job.queue):
            raise InvalidOption("a job must have an id and a queue")
        for name in (job.id, job.queue, job.task, job.key):
            if len(name) * 4 > MAX_NAME and len(name.encode()) > MAX_NAME:
                raise InvalidOption(f"the name {name[:40]!r}… has more than {MAX_NAME} bytes")
        for what, bound in _BOUNDS.items():
            value = getattr(job, what)
            if not 0 <= value <= bound:  # refuses NaN, too
                raise InvalidOption(f"the {what} of a job must be 0 to {bound:.0f}, not {value}")
        check_size(job.body, job.headers, job.tags)


def check_owner(owner: Owner) -> None:
    """Refuse invalid names of an owner, its kind, its host and its queues."""
    check_name("the id of an owner", owner.id)
    for what, name in [("kind", owner.kind), ("name", owner.name), ("host", owner.host)]:
        if name:
            check_name(f"the {what} of an owner", name)
    if len(owner.queues) > MAX_QUEUES:
        raise InvalidOption(f"an owner has {MAX_QUEUES:,} queues at most, not {len(owner.queues)}")
    for name in owner.queues:
        check_name("a queue of an owner", name)


def check_seconds(what: str, seconds: float) -> None:
    """Refuse durations that the clock of a store cannot hold."""
    if not 0 <= seconds <= MAX_SECONDS:  # refuses NaN, too
        raise InvalidOption(f"{what} must be 0 to {MAX_SECONDS:.0f} seconds, not {seconds}")
