"""How one process takes messages: its owners, and waits that an event loop may give up.

A message with ttr=0 is handed out at most once. Until its consumer surely gets the message, the
message is leased like any other, and goes back to its place when nobody takes it. Its
acknowledgement is stored before the message is handed over (``docs/design/at-most-once.md``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidemill.brokers.base import Mode, Reply, Step, Want
from tidemill.clock import new_id, wall_time
from tidemill.config import Seconds, check_name, check_seconds
from tidemill.errors import CodecError, InvalidOption, TidemillError
from tidemill.job import Lease, Outcome, Owner, Verdict
from tidemill.locks import Condition, Lock
from tidemill.queue import Message
from tidemill.threads import cancel_later
from tidemill.trust import refusal, trusted
from tidemill.undelivered import as_new

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["Consumers", "Session"]

log = logging.getLogger("tidemill")

FOREVER = 1e9

YOUNG = 30.0
"""Seconds for which a message surely stays leased."""

BRISK = 1.0
"""Seconds that each step of ``get`` may wait for other writers of the store at least."""

PATIENCE = 5.0
"""Seconds that a close waits for the calls of ``get`` that it ends."""


class Session:
    """The consumers of this process from the first ``get`` until the app is closed.

    Attributes:
        over: the app was closed; waits end, and nothing more is taken.
        waiting: by owner, the thread that is inside of ``get``.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.over = False
        self.idle: list[str] = []
        self.attached: dict[str, Owner] = {}
        self.waiting: dict[str, int] = {}
        self._changed = Condition()

    @contextlib.contextmanager
    def owner(self, mill: Tidemill) -> Iterator[str]:
        """An owner for one call of ``get``."""
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

    def _attach(self, mill: Tidemill) -> str:
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

    def close(self, mill: Tidemill) -> None:
        """End the calls of ``get`` that wait in other threads, and see them off."""
        self.over = True
        until = time.monotonic() + PATIENCE
        with self._changed:
            for owner in self._elsewhere():
                with contextlib.suppress(TidemillError):  # not attached yet, or not any more
                    mill.broker.wake(owner)
            while self._elsewhere() and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _elsewhere(self) -> list[str]:
        """Owners that wait in other threads: a signal handler may close what it interrupted."""
        here = threading.get_ident()
        return [owner for owner, thread in list(self.waiting.items()) if thread != here]


class Consumers:
    """The owners by which one process takes messages: one for each get that waits at a time."""

    def __init__(self, mill: Tidemill) -> None:
        self.mill = mill
        self._session = Session()

    @property
    def session(self) -> Session:
        """The owners of this process; a forked child begins with none."""
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
        """See :meth:`tidemill.Tidemill.get`; None as well when the ``session`` is over."""
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
                # The last look does not ask to be hinted: nobody will be there to hear it.
                want = Want(1, names, Mode.STRICT, tasks=False, messages=True, sleep=left > 0)
                asleep = left > 0
                reply = self.exchange(Step(owner, want=want, patience=max(BRISK, left)))
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
            if lease is not None:  # a signal handler has raised, or the store is away
                self._give_back(owner, lease, time.monotonic() - taken < YOUNG)
            raise
        finally:
            if asleep:  # interrupted: a hint for us must reach somebody else
                want = Want(0, names, Mode.STRICT, tasks=False, messages=True, sleep=False)
                self.exchange(Step(owner, want=want, patience=BRISK))
        return None

    def _deliver(self, message: Message, stop: Stop | None) -> Message | None:
        """The message, once nothing can take it from its consumer; else it goes back."""
        if stop is not None and not stop.hand_over(message):
            message.release()
            return None
        return message if message.claim() else None

    def _give_back(self, owner: str, lease: Lease, is_young: bool) -> None:
        """Release a message that was not handed over; put it once more if it was acknowledged.

        Only an acknowledgement ends a young lease. An old one may have been lost to another
        consumer.
        """
        verdict = Verdict(lease.token, Outcome.RELEASE, ended=wall_time())
        with contextlib.suppress(TidemillError, msgspec.DecodeError):  # else its ttr runs out
            (released,) = self.exchange(Step(owner, [verdict])).settled
            if not released and is_young and (envelope := lease.open()).at_most_once:
                self.mill.broker.put([as_new(envelope, lease)])

    async def aget(
        self, queues: Sequence[str], timeout: Seconds | None, session: Session | None = None
    ) -> Message | None:
        """As ``get``; when cancelled, nothing stays taken.

        A message with ttr=0 whose acknowledgement is being stored is returned all the same. The
        caller is then cancelled at its next ``await``.
        """
        stop = Stop(self.mill)
        pool = self.mill.threads if timeout == 0 else self.mill.waiters
        call = pool.begin(self.get, queues, timeout, stop, session)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            message = stop.stop()
            if message is None:
                call.cancel()  # a call that has not begun is never made
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
        """The message of a lease; None when it cannot be trusted: it has failed, or comes again."""
        try:
            envelope = lease.open()
            trusted(envelope, self.mill.keys)
        except (CodecError, msgspec.DecodeError) as error:
            log.error("a message in one of our queues cannot be used: %s", error)
            self.exchange(Step(owner, verdicts=[refusal(lease, error)]))
            return None
        return Message(self, owner, lease, envelope)

    def exchange(self, step: Step) -> Reply:
        """One exchange of an owner of this process."""
        reply = self.mill.broker.exchange(step)
        if any(command.verb == "lost" for command in reply.commands):
            # Silent for longer than its lease, it was given up; what it held had run out before.
            owner = self.session.attached.get(step.owner)
            if owner is not None:  # not closed meanwhile
                self.mill.broker.attach(owner)
        return reply

    def close(self) -> None:
        """Forget the owners; the broker lets them go when it is closed."""
        session, self._session = self.session, Session()
        session.close(self.mill)


class Stop:
    """How an event loop tells a thread that waits for a message that it is not wanted any more."""

    def __init__(self, mill: Tidemill) -> None:
        self._mill = mill
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._owner = ""
        self._over = False
        self._message: Message | None = None

    def goes_on(self, owner: str) -> bool:
        """In the thread, before each look: may it go on?"""
        with self._lock:
            self._owner, self._message = owner, None
            return not self._over

    def hand_over(self, message: Message) -> bool:
        """In the thread, with a message in hand: does anybody still want it?"""
        with self._lock:
            self._owner = ""
            if self._over or self._loop.is_closed():
                return False
            self._message = message
            return True

    def stop(self) -> Message | None:
        """In the loop: the call was cancelled. The message that was handed over before."""
        with self._lock:
            self._over = True
            if self._owner:
                self._mill.broker.wake(self._owner)
            return self._message


async def _outcome(call: asyncio.Future[Message | None]) -> None:
    """Wait until a call has ended, however often the waiting task is cancelled."""
    while not call.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([call])


def _release(message: Message) -> None:
    with contextlib.suppress(TidemillError):  # else its ttr runs out
        message.release()
