"""Group commit: one leader at a time writes the store for all callers of this process.

A caller appends its request and tries to become the leader. The leader takes the write lock, begins
a transaction, applies all requests that have arrived by then, commits once, and wakes the other
callers. When a request fails, the transaction is dropped, and each request is replayed by itself. A
caller that meets no other caller commits at once, without a request. While another process has the
write lock (:mod:`.write_lock`), a writer thread leads in place of the callers.

A request that reports its changes before they are durable is applied last. Then no later request
can fail and undo the commit.

Callers whose requests are done are woken together with the next leader. The next leader waits a
moment for their next requests (:mod:`tidemill.core.commit_delay`). If the callers woke later, they
would miss that commit. If they woke while the leader works, they would take the interpreter lock
from the leader at each call into LMDB.

A caller that is interrupted while it waits takes its request back, and passes the lead on if it has
just got the lead. Nothing interrupts a caller at other times: timeouts wait, and signal handlers
are deferred (:mod:`tidemill.core.signals`).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import lmdb

from tidemill.brokers.lmdb.engine.transactions import Writing
from tidemill.brokers.lmdb.engine.write_lock import WriteLock, Writer
from tidemill.core.commit_delay import CommitDelay
from tidemill.core.crash_points import point
from tidemill.core.signals import (
    begin_interruptible_wait,
    defer_signals,
    end_interruptible_wait,
    lower_shield,
    raise_shield,
    resume_signals,
)
from tidemill.errors import StoreBusy, TidemillError

PATIENCE = 30.0  # seconds that a caller waits for the write lock, unless the URL has another value
BRISK = 1.0  # seconds that a supervisor's steps, housekeeping and detaching wait for the write lock
LONG = 5.0  # seconds of a wait for the write lock after which the log names its holder

log = logging.getLogger("tidemill")


class Context(Protocol):
    """The object to which requests are applied."""

    def finish(self) -> None:
        """Write the gathered changes; called before the commit."""
        ...

    def committed(self) -> None:
        """Called after the commit, before the next one can begin."""
        ...


C = TypeVar("C", bound=Context)
T = TypeVar("T")
R = TypeVar("R", covariant=True)


class Quick(Protocol[R]):
    """A request that needs no context."""

    def apply(self, txn: lmdb.Transaction[bytes]) -> R | None:
        """Make the changes and return the result; None, and nothing is changed, to decline."""
        ...

    def committed(self) -> None: ...


class Request:
    """The request of one caller."""

    __slots__ = ("apply", "done", "error", "last", "leads", "main", "result", "turn")

    def __init__(self, apply: Callable[[Any], Any], *, last: bool = False) -> None:
        self.apply = apply
        self.last = last
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.leads = False  # True when its caller got the lead
        # True when its caller is the main thread, which may run a signal handler.
        self.main = False
        self.turn = threading.Lock()
        self.turn.acquire()


class GroupCommit:
    """The commits of one store, as this process makes them."""

    # ``translated`` turns a driver's error into an error of tidemill. ``place`` names the store in
    # messages.

    def __init__(
        self,
        env: lmdb.Environment,
        lock: WriteLock,
        translated: Callable[[Exception], Exception],
        place: str = "",
        points: bool = True,
    ) -> None:
        self.env = env
        self.lock = lock
        self.patience = PATIENCE
        self.leader = 0  # id of the thread that has the lead
        self.lead = threading.Lock()
        self.pending: collections.deque[Request] = collections.deque()
        self._answered: list[Request] = []  # requests that are done, whose callers are to be woken
        self._delay = CommitDelay()
        self._translated = translated
        self.place = place
        self._points = points
        self._next_word = 0.0  # monotonic time of the next log line about a held lock
        self._make: Callable[[lmdb.Transaction[bytes]], Context] | None = None
        self._writer = Writer(self._write_for_others)

    @property
    def brisk(self) -> float:
        """Seconds that a call waits for the write lock if the caller will repeat the call."""
        return min(BRISK, self.patience)

    def run(
        self,
        make: Callable[[lmdb.Transaction[bytes]], C],
        apply: Callable[[C], T],
        *,
        quick: Quick[T] | None = None,
        last: bool = False,
        patience: float | None = None,
    ) -> T:
        """Commit ``apply(make(txn))``; return the result of ``apply`` when the commit is durable.

        A caller without company first tries ``quick``. If ``quick`` declines, ``apply`` follows.
        ``apply`` may run again when the transaction was dropped. With ``last``, it runs after all
        other requests of the commit. ``patience``: seconds to wait for other writers.

        Raises:
            Exception: an error of ``apply``; nothing was changed.
            StoreFull: the disk or the map has no room.
            StoreBusy: the write lock was not free in time.
        """
        if self.leader == threading.get_ident():
            raise TidemillError("this call would wait for itself: it was made inside a store step")
        self._make = make
        deferred = defer_signals()
        try:
            raise_shield()
            try:
                if self._leads_alone():
                    return self._commit(make, apply, quick)
                request = Request(apply, last=last)
                request.main = deferred
                self._take_part(make, request, self.patience if patience is None else patience)
            finally:
                lower_shield()
        finally:
            if deferred:
                resume_signals()
        if request.error is not None:
            raise request.error
        return request.result  # type: ignore[no-any-return]  # the result of ``apply``

    def _point(self, name: str) -> None:
        if self._points:
            point(name)

    def _leads_alone(self) -> bool:
        """Take the lead and the lock, if no other caller is there or is expected."""
        if self.pending or self._delay.expects or not self.lead.acquire(blocking=False):
            return False
        if self.lock.take():
            self.leader = threading.get_ident()
            return True
        self.pass_on()
        return False

    def _commit(
        self,
        make: Callable[[lmdb.Transaction[bytes]], C],
        apply: Callable[[C], T],
        quick: Quick[T] | None,
    ) -> T:
        """With the lead and the lock, commit for this caller only."""
        locked = True
        try:
            self._point("store.begin")
            with Writing(self.env, self.place) as txn:
                self._point("store.begun")
                if quick is not None and (answer := quick.apply(txn)) is not None:
                    result, committed = answer, quick.committed
                else:
                    context = make(txn)
                    result, committed = apply(context), context.committed
                    context.finish()
                self._point("store.commit")
            locked = False
            self.lock.free()
            self._point("store.committed")
            committed()
            return result
        except Exception as error:
            raise self._translated(error)  # noqa: B904 - it names its cause
        finally:
            if locked:
                self.lock.free()
            if self.pending:  # as after a commit for several callers
                self._delay.expect(1, len(self.pending))
            self.pass_on()

    def _take_part(
        self, make: Callable[[lmdb.Transaction[bytes]], Context], request: Request, patience: float
    ) -> None:
        self.pending.append(request)
        self._delay.arrived(len(self.pending))
        deadline = 0.0
        leads = self.lead.acquire(blocking=False)
        while leads or self._follow(request, deadline, patience):
            if request.done or self._try_to_lead(make, request):
                self.pass_on()
                break
            leads, deadline = False, deadline or time.monotonic() + patience

    def _try_to_lead(
        self, make: Callable[[lmdb.Transaction[bytes]], Context], request: Request
    ) -> bool:
        """With the lead, commit; False when another process has the lock: then the writer waits."""
        self.leader = threading.get_ident()
        try:
            self._delay.wait(self.pending)
            if self.lock.take():
                self._lead(make, request)
                return True
            if not self._writer.call():  # no writer thread can start: wait for the lock here
                self.lock.wait()
                self._lead(make, request)
                return True
        except BaseException:  # for example Ctrl-C during the commit delay
            self._forget(request)
            self.pass_on()
            raise
        self.leader = 0
        self.lead.release()  # new callers need no leader: the writer thread leads for all
        return False

    def _forget(self, request: Request) -> None:
        with contextlib.suppress(ValueError):
            self.pending.remove(request)

    def _follow(self, request: Request, deadline: float, patience: float) -> bool:
        """Wait until a leader has applied the request; True when this caller gets the lead."""
        try:
            left = max(0.0, deadline - time.monotonic()) if deadline else patience
            in_time = _await_turn(request, min(left, LONG))
            if not in_time and left > LONG:
                self._say_held()
                in_time = _await_turn(request, left - LONG)
        except BaseException:
            self._leave(request)
            raise
        if not in_time:
            holder = self.lock.holder()
            self._leave(request)
            if not request.done:
                raise StoreBusy(
                    f"the store{self.place} was not free for {patience:g} s: its write lock is "
                    f"held {holder}"
                )
        if not request.leads:
            return False
        request.leads = False
        self.pending.appendleft(request)
        return True

    def _say_held(self) -> None:
        """Log which other process has the write lock, once a minute."""
        now = time.monotonic()
        if now >= self._next_word and not self.leader:
            self._next_word = now + 60.0
            log.warning(
                "the store%s has not been free for %g s: its write lock is held %s",
                self.place,
                LONG,
                self.lock.holder(),
            )

    def _leave(self, request: Request) -> None:
        """Take back a request whose caller stops waiting."""
        try:
            self.pending.remove(request)
        # The request is not pending: a leader applies it, or has just made us the leader.
        except ValueError:
            # Wait, since a leader is applying the request.
            if not request.done and not request.leads:
                request.turn.acquire()
            if request.leads:
                request.leads = False
                self.pass_on()

    def _write_for_others(self) -> None:
        """In the writer thread: wait for the lock, then lead for all callers that came."""
        self.lock.wait()
        if not self.pending or self._make is None:  # all callers have given up
            self.lock.free()
            return
        self.lead.acquire()
        self.leader = threading.get_ident()
        try:
            self._lead(self._make, None)
        finally:
            self.pass_on()

    def close(self) -> None:
        self._writer.close()

    def _lead(
        self, make: Callable[[lmdb.Transaction[bytes]], Context], own: Request | None
    ) -> None:
        """With the lead and the lock, begin a transaction and commit all pending requests."""
        batch: list[Request] = []
        writing, locked = Writing(self.env, self.place), True
        try:
            try:
                self._point("store.begin")
                with writing as txn:
                    self._point("store.begun")
                    self._drain(batch)
                    context = make(txn)
                    for request in batch:
                        request.result = request.apply(context)
                    context.finish()
                    self._point("store.commit")
                locked = False
                self.lock.free()
                self._point("store.committed")
                context.committed()
            except Exception as error:
                self._answer_failed(make, batch, own, self._translated(error))
            else:
                for request in batch:
                    self._answer(request)
        except BaseException:  # for example Ctrl-C in the leader
            self._leave_others(own, batch, committed=writing.committed)
            raise
        finally:
            if locked:
                self.lock.free()

    def _leave_others(self, own: Request | None, batch: list[Request], *, committed: bool) -> None:
        """The leader was interrupted: answer the other requests, or let another thread lead."""
        if own is not None:
            self._forget(own)
        others = [request for request in batch if request is not own and not request.done]
        if committed:
            for request in others:
                self._answer(request)
        else:
            # Nothing was committed: the other callers try again.
            self.pending.extendleft(reversed(others))

    def _answer_failed(
        self,
        make: Callable[[lmdb.Transaction[bytes]], Context],
        batch: list[Request],
        own: Request | None,
        error: Exception,
    ) -> None:
        """After a dropped transaction: a single request gets the error, several are replayed."""
        if not batch:  # the transaction could not begin: only one request gets this error
            with contextlib.suppress(IndexError, ValueError):
                own = own or self.pending[0]
                self.pending.remove(own)
                batch.append(own)
        if len(batch) == 1:
            self._answer(batch[0], error)
        else:
            self._replay(make, batch)

    def _drain(self, batch: list[Request]) -> None:
        """Take all pending requests. The deque is never replaced: an append may be under way."""
        with contextlib.suppress(IndexError):  # fails when a caller has just taken its request back
            batch.extend(self.pending.popleft() for _ in range(len(self.pending)))
        batch.sort(key=_is_last)

    def _replay(
        self, make: Callable[[lmdb.Transaction[bytes]], Context], batch: list[Request]
    ) -> None:
        """Run each request in a transaction of its own, so that only its caller gets an error."""
        for request in batch:
            try:
                with Writing(self.env, self.place) as txn:
                    context = make(txn)
                    request.result = request.apply(context)
                    context.finish()
                context.committed()
            except Exception as error:
                self._answer(request, self._translated(error))
            else:
                self._answer(request)

    def _answer(self, request: Request, error: Exception | None = None) -> None:
        request.error = error
        request.done = True
        self._answered.append(request)

    def _wake(self) -> None:
        answered, self._answered = self._answered, []
        for request in answered:
            request.turn.release()

    def pass_on(self) -> None:
        """Hand the lead to a caller that came during the commit, or give the lead up."""
        # A caller that fails to take the lead appended its request before the lead is released
        # here. So the second look at ``pending``, after the release, sees the request.
        while True:
            if self._answered:
                self._delay.expect(len(self._answered), len(self.pending))
                self._wake()
            next_one = self._next() if self.pending else None
            called = next_one is None and bool(self.pending) and self._writer.call()
            # If the writer thread is needed and cannot start, a waiting caller leads.
            if next_one is None and not called and self.pending:
                with contextlib.suppress(IndexError):
                    next_one = self.pending.popleft()
            self.leader = 0
            if next_one is not None:
                next_one.leads = True
                next_one.turn.release()
                return
            self.lead.release()
            if called or not self.pending or not self.lead.acquire(blocking=False):
                return

    def _next(self) -> Request | None:
        """The request whose caller leads next; None if no thread waits except the main thread."""
        # The main thread gets no lead while it waits: a signal handler may run inside the wait. The
        # handler may last long, or enqueue a job and wait for this lead. So the writer thread leads
        # in place of the main thread.
        # Fails when no caller waits, or when a caller has just gone.
        with contextlib.suppress(IndexError, ValueError):
            request = self.pending.popleft()
            if not request.main:
                return request
            self.pending.appendleft(request)
            for other in list(self.pending):
                if not other.main:
                    self.pending.remove(other)
                    return other
        return None


def _await_turn(request: Request, timeout: float) -> bool:
    begin_interruptible_wait()
    in_time = request.turn.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
    end_interruptible_wait()
    return in_time


def _is_last(request: Request) -> bool:
    return request.last
