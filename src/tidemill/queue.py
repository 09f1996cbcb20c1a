"""Messages without functions: put, get, acknowledge. What gmq, beanstalkd and the LMDB queue are for."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.brokers.base import Feature, Mode, Step, Want, need
from tidemill.clock import new_id, wall_time
from tidemill.codec import pack, unpack
from tidemill.config import (
    Seconds,
    check_body,
    check_conflict,
    check_count,
    check_known,
    check_moment,
    check_name,
    check_priority,
    check_retries,
    check_seconds,
)
from tidemill.errors import InvalidOption, LeaseLost, QueueFull
from tidemill.job import Envelope, Lease, Outcome, Owner, Verdict
from tidemill.retry import ENDLESS

if TYPE_CHECKING:
    from tidemill.app import Tidemill
    from tidemill.handle import Job

__all__ = ["Consumers", "Message", "Queue"]

FOREVER = 1e9
_PUT_OPTIONS = (
    *("id", "delay", "at", "ttr", "priority", "key", "on_conflict"),
    *("expires", "retries", "tags", "headers"),
)


class Queue:
    """One queue of raw messages, by name. Bodies are any plain data; types are kept."""

    def __init__(self, mill: Tidemill, name: str, *, max_size: int | None = None) -> None:
        self._mill = mill
        self.name = check_name("queue", name)
        if max_size is not None:
            check_count("max_size", max_size)
            need(mill.broker, Feature.MAX_SIZE, "max_size=")
            mill.broker.set_queue(name, max_size=max_size)

    # -- producing ------------------------------------------------------------------------------

    def put(
        self, body: Any, *, txn: Any = None, timeout: Seconds | None = None, **options: Any
    ) -> Job[Any]:
        """Store one message; durable when this returns.

        Args:
            body: plain data.
            txn: store it inside the caller's own transaction.
            timeout: seconds to wait for room in a queue of ``max_size``; at once when not given.
            options: ``id delay at ttr priority key on_conflict expires retries tags headers``.

        Raises:
            DuplicateJob, QueueFull, StoreFull, InvalidOption: nothing was stored.
        """
        (job,) = self.put_many([body], txn=txn, timeout=timeout, **options)
        return job

    def put_many(
        self,
        bodies: Iterable[Any],
        *,
        txn: Any = None,
        timeout: Seconds | None = None,
        **options: Any,
    ) -> list[Job[Any]]:
        """Store many messages in one commit, all or none, in order; options as for ``put``."""
        from tidemill.handle import Job

        bodies = list(bodies)
        if options.get("id") is not None and len(bodies) > 1:
            raise InvalidOption("id names one message; leave it out of put_many")
        fields = _fields(options)
        envelopes = [self._envelope(body, fields) for body in bodies]
        if txn is not None:
            need(self._mill.broker, Feature.TRANSACTIONS, "txn=")
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        while True:
            try:
                puts = self._mill.broker.put(envelopes, txn=txn)
                return [Job(self._mill, put.id, put.placed) for put in puts]
            except QueueFull:
                left = 0.0 if deadline is None else deadline - time.monotonic()
                if left <= 0 or not self._mill.broker.wait_space(self.name, left):
                    raise

    def _envelope(self, body: Any, fields: Mapping[str, Any]) -> Envelope:
        data = check_body(pack(body))
        text = repr(body) if len(data) < 2000 else ""
        return Envelope(
            queue=self.name,
            body=data,
            created=wall_time(),
            text=text if len(text) <= 120 else text[:119] + "…",
            **{"id": new_id(), **fields},
        )

    async def aput(self, body: Any, **options: Any) -> Job[Any]:
        """As ``put``, without blocking the event loop."""
        job: Job[Any] = await self._mill.threaded(lambda: self.put(body, **options))
        return job

    # -- consuming ------------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> Message | None:
        """The next message; None when nothing came within ``timeout`` seconds."""
        return self._mill.get([self.name], timeout)

    def get_nowait(self) -> Message | None:
        """The next message if there is one."""
        return self._mill.get([self.name], 0)

    async def aget(self, timeout: float | None = None) -> Message | None:
        """As ``get``, without blocking the event loop."""
        return await self._mill.aget([self.name], timeout)

    def __iter__(self) -> Iterator[Message]:
        """Messages without end."""
        while True:
            message = self.get()
            if message is not None:
                yield message

    async def __aiter__(self) -> Any:
        while True:
            message = await self.aget()
            if message is not None:
                yield message

    # -- looking after --------------------------------------------------------------------------

    def size(self) -> int:
        """Unfinished jobs: waiting, scheduled, ready and running."""
        return next((s.size for s in self._mill.broker.stats() if s.name == self.name), 0)

    def pause(self) -> None:
        """Hand out nothing until ``resume``; puts go on."""
        need(self._mill.broker, Feature.PAUSE, "pause()")
        self._mill.broker.set_queue(self.name, paused=True)

    def resume(self) -> None:
        """Hand out again."""
        self._mill.broker.set_queue(self.name, paused=False)

    def purge(self) -> int:
        """Delete everything that is not running or finished; how many that were."""
        return self._mill.broker.purge(self.name)

    def __repr__(self) -> str:
        return f"<queue {self.name}>"


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checked options of a put as fields of an envelope."""
    check_known("put", options, _PUT_OPTIONS)
    given = {name: value for name, value in options.items() if value is not None}
    if "delay" in given and "at" in given:
        raise InvalidOption("give either delay or at, not both")
    fields: dict[str, Any] = {"retries": ENDLESS}
    for name, value in given.items():
        if name in ("delay", "ttr", "expires"):
            fields[name] = check_seconds(name, value)
        elif name == "at":
            fields["at"] = check_moment("at", value)
        elif name == "priority":
            fields["rank"] = check_priority(value)
        elif name in ("id", "key"):
            fields[name] = check_name(name, value)
        elif name == "on_conflict":
            fields[name] = check_conflict(value)
        elif name == "retries":
            fields[name] = check_retries(value)
        elif name == "tags":
            fields[name] = tuple(check_name("tag", tag) for tag in value)
        else:
            fields[name] = dict(value)
    return fields


class Message:
    """A leased message. As a context manager it is acknowledged at the end, or released on an error.

    Attributes:
        id, queue, body, key, tags, headers: as they were put.
        attempt: 1 the first time it is handed out, more after a redelivery.
        ttr: seconds to acknowledge it in, from the lease or the latest ``touch``; 0 for a message
            that was gone when taken.
    """

    def __init__(self, consumers: Consumers, owner: str, lease: Lease) -> None:
        envelope = lease.open()
        self._consumers = consumers
        self._owner = owner
        self._token = lease.token
        self.id = envelope.id
        self.queue = envelope.queue
        self.key = envelope.key
        self.tags = envelope.tags
        self.headers = envelope.headers
        self.attempt = lease.attempt
        self.ttr = lease.deadline
        self._body = envelope.body
        self._leased = lease.leased

    @property
    def body(self) -> Any:
        """The body.

        Raises:
            CodecError: it is not what a put of ours wrote.
        """
        return unpack(self._body)

    def ack(self) -> bool:
        """It is done: forget it. False when the lease was lost; then nothing changes."""
        return self._settle(Outcome.SUCCESS)

    def release(self, delay: Seconds = 0) -> bool:
        """Back into the queue, after ``delay`` seconds, as if it had not been taken."""
        return self._settle(Outcome.RELEASE, delay=check_seconds("delay", delay))

    def bury(self, reason: str = "buried") -> bool:
        """It cannot be done: keep it, failed, for a human to look at and kick."""
        return self._settle(Outcome.FAIL, error=str(reason))

    def touch(self, ttr: Seconds | None = None) -> bool:
        """More time: the ttr starts anew, or with another value. False when the lease was lost."""
        seconds = 0.0 if ttr is None else check_seconds("ttr", ttr)
        step = Step(self._owner, touch=[(self._token, seconds)])
        return self._consumers.exchange(step).touched[0]

    async def aack(self) -> bool:
        """As ``ack``."""
        return await self._consumers.mill.threaded(self.ack)

    async def arelease(self, delay: Seconds = 0) -> bool:
        """As ``release``."""
        return await self._consumers.mill.threaded(self.release, delay)

    async def abury(self, reason: str = "buried") -> bool:
        """As ``bury``."""
        return await self._consumers.mill.threaded(self.bury, reason)

    async def atouch(self, ttr: Seconds | None = None) -> bool:
        """As ``touch``."""
        return await self._consumers.mill.threaded(self.touch, ttr)

    def _settle(self, outcome: Outcome, *, delay: float = 0.0, error: str = "") -> bool:
        verdict = Verdict(
            self._token,
            outcome,
            delay=delay,
            error=error,
            started=self._leased,
            ended=wall_time(),
        )
        return self._consumers.exchange(Step(self._owner, verdicts=[verdict])).settled[0]

    def __enter__(self) -> Message:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not self.ttr:
            return
        if error is None:
            if not self.ack():
                raise LeaseLost(
                    f"message {self.id} was not acknowledged within its ttr of {self.ttr:g} s; "
                    "another consumer may have it. Touch it while working, or put it with a longer ttr"
                )
        else:
            # An error counts as an attempt, so that retries= can end a message that never works.
            self._settle(Outcome.RETRY, error=f"{type(error).__name__}: {error}")

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        await self._consumers.mill.threaded(self.__exit__, kind, error, trace)

    def __repr__(self) -> str:
        return f"<message {self.id} of {self.queue}, attempt {self.attempt}>"


class Consumers:
    """The owners by which one process takes messages: one for each get that waits at a time."""

    def __init__(self, mill: Tidemill) -> None:
        self.mill = mill
        self._idle: list[str] = []
        self._all: list[str] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def get(self, queues: Sequence[str], timeout: float | None) -> Message | None:
        """See :meth:`tidemill.Tidemill.get`."""
        if isinstance(queues, str) or not queues:
            raise InvalidOption("queues must be a list of at least one queue name")
        names = tuple(check_name("queue", name) for name in queues)
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        deadline = time.monotonic() + seconds
        with self._owner() as owner:
            while True:
                left = deadline - time.monotonic()
                # The last look does not ask to be hinted: nobody will be there to hear it.
                want = Want(1, names, Mode.STRICT, tasks=False, messages=True, sleep=left > 0)
                reply = self.exchange(Step(owner, want=want))
                if reply.leases:
                    return Message(self, owner, reply.leases[0])
                if left <= 0:
                    return None
                self.mill.broker.wait(owner, max(0.0, min(left, reply.next_due)))

    def exchange(self, step: Step) -> Any:
        """One exchange of an owner of this process."""
        return self.mill.broker.exchange(step)

    @contextlib.contextmanager
    def _owner(self) -> Iterator[str]:
        owner = self._take()
        try:
            yield owner
        finally:
            with self._lock:
                self._idle.append(owner)

    def _take(self) -> str:
        with self._lock:
            if self._pid != os.getpid():  # a forked child: those were the parent's
                self._pid, self._idle, self._all = os.getpid(), [], []
            if self._idle:
                return self._idle.pop()
        owner = Owner(
            id=new_id(),
            kind="consumer",
            name=f"{socket.gethostname()}:{os.getpid()}",
            host=socket.gethostname(),
            pid=os.getpid(),
            started=wall_time(),
        )
        self.mill.broker.attach(owner)
        with self._lock:
            self._all.append(owner.id)
        return owner.id

    def close(self) -> None:
        """Let all owners go."""
        with self._lock:
            self._idle, self._all = [], []
