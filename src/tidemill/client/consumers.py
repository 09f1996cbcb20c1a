"""Take messages in one process: owners for the calls of ``get``, and cancelled calls of ``aget``.

A message with ttr=0 is handed out at most once. It is leased like any other message, and goes back
to its place if nobody takes it. Its acknowledgement is stored just before the message is handed
over (``docs/design/at-most-once.md``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want
from tidemill.client.message import Message
from tidemill.client.runtime import Runtime
from tidemill.client.threads import cancel_later
from tidemill.client.undelivered import fresh_copy
from tidemill.core.clock import new_id, wall_time
from tidemill.core.config import Seconds, check_name, check_seconds
from tidemill.core.errors import CodecError, InvalidOption, TidemillError
from tidemill.core.job import Lease, Outcome, Owner, Verdict
from tidemill.core.locks import Condition, Lock
from tidemill.core.signatures import refusal, trusted

__all__ = ["Consumers", "Session"]

T = TypeVar("T")
log = logging.getLogger("tidemill")

FOREVER = 1e9

YOUNG_LEASE = 30.0
"""Seconds for which the lease of a message has surely not run out."""

SHORT_PATIENCE = 1.0
"""The least seconds that a step of ``get`` waits for other writers of the store."""

PATIENCE = 5.0
"""Seconds that a close waits for running calls of ``get`` to end."""


class Session:
    """The consumers of this process from the first ``get`` until the app is closed.

    Attributes:
        over: True once the app was closed: waits end, and no message is taken.
        waiting: the thread inside ``get``, by owner.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.over = False
        self.idle: list[str] = []
        self.attached: dict[str, Owner] = {}
        self.waiting: dict[str, int] = {}
        self._changed = Condition()

    @contextlib.contextmanager
    def owner(self, mill: Runtime) -> Iterator[str]:
        """Lend an owner to one call of ``get``."""
        try:
            owner = self.idle.pop()
        except IndexError:
            owner = self._attach(mill)
        self.waiting[owner] = threading.get_ident()
        try:
            yield owner
        finally:
            with self._changed:
                self.waiting.pop(owner, None)
                self.idle.append(owner)
                self._changed.notify_all()

    def _attach(self, mill: Runtime) -> str:
        host, pid = socket.gethostname(), os.getpid()
        owner = Owner(
            id=new_id(),
            kind="consumer",
            name=f"{host}:{pid}",
            host=host,
            pid=pid,
            started=wall_time(),
        )
        mill.broker.attach(owner)
        self.attached[owner.id] = owner
        return owner.id

    def close(self, mill: Runtime) -> None:
        """End the calls of ``get`` in other threads, and wait until they have ended."""
        self.over = True
        until = time.monotonic() + PATIENCE
        with self._changed:
            for owner in self._in_other_threads():
                with contextlib.suppress(TidemillError):  # not attached now
                    mill.broker.wake(owner)
            while self._in_other_threads() and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _in_other_threads(self) -> list[str]:
        """Owners in other threads. A signal handler may close the app inside of ``get``."""
        here = threading.get_ident()
        return [owner for owner, thread in list(self.waiting.items()) if thread != here]


class Consumers:
    """The owners of one process: one for each call of ``get`` that waits at a time."""

    def __init__(self, mill: Runtime) -> None:
        self.mill = mill
        self._session = Session()

    @property
    def session(self) -> Session:
        """The owners of this process. A forked child starts without owners."""
        if self._session.pid != os.getpid():
            self._session = Session()
        return self._session

    def get(
        self,
        queues: Sequence[str],
        timeout: Seconds | None,
        stop: Stop | None = None,
        session: Session | None = None,
    ) -> Message | None:
        """See :meth:`tidemill.Tidemill.get`. Returns None when the ``session`` is over."""
        if isinstance(queues, str) or not queues:
            raise InvalidOption("queues must be a list of at least one queue name")
        names = tuple(check_name("queue", name) for name in queues)
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        deadline = time.monotonic() + seconds
        session = session or self.session
        try:
            if not session.over:
                with session.owner(self.mill) as owner:
                    return self._get(session, owner, names, deadline, stop)
        except TidemillError:
            if not session.over:
                raise
        return None

    def _get(
        self,
        session: Session,
        owner: str,
        names: tuple[str, ...],
        deadline: float,
        stop: Stop | None,
    ) -> Message | None:
        asleep, lease, taken = False, None, 0.0
        try:
            while not session.over and (stop is None or stop.goes_on(owner)):
                left = deadline - time.monotonic()
                # The last exchange asks for no wake-up: this call will be over.
                want = Want(1, names, Mode.STRICT, tasks=False, messages=True, sleep=left > 0)
                asleep = left > 0
                reply = self.exchange(Step(owner, want=want, patience=max(SHORT_PATIENCE, left)))
                if reply.leases:
                    asleep, lease, taken = False, reply.leases[0], time.monotonic()
                    message = self._open(owner, lease)
                    if message is not None and (message := self._deliver(message, stop)):
                        return message
                    lease = None
                elif left <= 0:
                    return None
                else:
                    self.mill.broker.wait(owner, max(0.0, min(left, reply.next_due)))
        except BaseException:
            if lease is not None:  # a signal handler has raised, or the store is unreachable
                self._give_back(owner, lease, time.monotonic() - taken < YOUNG_LEASE)
            raise
        finally:
            if asleep:  # interrupted: another owner must get the wake-up
                want = Want(0, names, Mode.STRICT, tasks=False, messages=True, sleep=False)
                self.exchange(Step(owner, want=want, patience=SHORT_PATIENCE))
        return None

    def _deliver(self, message: Message, stop: Stop | None) -> Message | None:
        """Claim the message for its consumer; None, and a release, if nobody wants it any more."""
        if stop is not None and not stop.hand_over(message):
            message.release()
            return None
        return message if message.claim() else None

    def _give_back(self, owner: str, lease: Lease, is_young: bool) -> None:
        """Release a message that was not handed over. If it was acknowledged, put it again.

        A young lease ends only by an acknowledgement. An old lease may have been lost to another
        consumer.
        """
        verdict = Verdict(lease.token, Outcome.RELEASE, ended=wall_time())
        with contextlib.suppress(TidemillError, msgspec.DecodeError):  # otherwise the ttr runs out
            (released,) = self.exchange(Step(owner, [verdict])).settled
            if not released and is_young and (envelope := lease.open()).at_most_once:
                self.mill.broker.put([fresh_copy(envelope, lease)])

    async def aget(
        self, queues: Sequence[str], timeout: Seconds | None, session: Session | None = None
    ) -> Message | None:
        """As ``get``. A cancelled call takes no message.

        If the acknowledgement of a message with ttr=0 is under way, the message is returned, and
        the caller is cancelled at its next ``await``.
        """
        stop = Stop(self.mill)
        pool = self.mill.threads if timeout == 0 else self.mill.waiters
        call = pool.begin(self.get, queues, timeout, stop, session)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            message = stop.stop()
            if message is None:
                call.cancel()  # a call that has not begun is not made
                raise
            if not message.at_most_once:
                call.add_done_callback(self._release_later)
                raise
            await _outcome(call)
            if call.cancelled() or call.exception() is not None or call.result() is None:
                raise
            cancel_later()
            return call.result()

    def _release_later(self, call: asyncio.Future[Message | None]) -> None:
        if not call.cancelled() and call.exception() is None:
            message = call.result()
            if message is not None:
                self.mill.threads.start(lambda: _release(message))

    def _open(self, owner: str, lease: Lease) -> Message | None:
        """The message of a lease. A message that is not trusted is refused, and gives None."""
        try:
            envelope = lease.open()
            trusted(envelope, self.mill.keys)
        except (CodecError, msgspec.DecodeError) as error:
            log.error("a message cannot be used: %s", error)
            self.exchange(Step(owner, verdicts=[refusal(lease, error)]))
            return None
        return Message(self, owner, lease, envelope)

    async def threaded(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking call in a thread of the app."""
        return await self.mill.threaded(function, *args)

    def exchange(self, step: Step) -> Reply:
        """Make one exchange of an owner of this process."""
        reply = self.mill.broker.exchange(step)
        if any(command.verb == "lost" for command in reply.commands):
            # The owner was silent for too long, and the store gave it up.
            owner = self.session.attached.get(step.owner)
            if owner is not None:  # the app was not closed meanwhile
                self.mill.broker.attach(owner)
        return reply

    def close(self) -> None:
        """Forget the owners. The broker detaches them when it is closed."""
        session, self._session = self.session, Session()
        session.close(self.mill)


class Stop:
    """Lets an event loop stop a thread that waits for a message."""

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._owner = ""
        self._over = False
        self._message: Message | None = None

    def goes_on(self, owner: str) -> bool:
        """In the thread, before each exchange: False after ``stop``."""
        with self._lock:
            self._owner, self._message = owner, None
            return not self._over

    def hand_over(self, message: Message) -> bool:
        """In the thread, with a message: False if the loop does not want it any more."""
        with self._lock:
            self._owner = ""
            if self._over or self._loop.is_closed():
                return False
            self._message = message
            return True

    def stop(self) -> Message | None:
        """In the loop: stop the thread. Returns the message that the thread has handed over."""
        with self._lock:
            self._over = True
            if self._owner:
                self._mill.broker.wake(self._owner)
            return self._message


async def _outcome(call: asyncio.Future[Message | None]) -> None:
    """Wait until a call has ended, also while the waiting task is cancelled."""
    while not call.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([call])


def _release(message: Message) -> None:
    with contextlib.suppress(TidemillError):  # otherwise the ttr runs out
        message.release()
