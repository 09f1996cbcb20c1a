"""Group commit: a store is written by one leader at a time, for all who came meanwhile.

A caller appends its request and tries to lead. The leader begins the transaction (and waits there
for other processes), takes all requests that have arrived meanwhile, applies each, commits once,
and wakes the others. When one request fails, the transaction is abandoned and each is replayed by
itself, so that only the culprit sees its error.

A request that tells somebody of what it did before it is durable goes ``last``: when it is applied
there is hardly anything left that can undo it.

Followers who have their answer are woken together with the next leader, which waits a moment for
their next requests (:mod:`.gathering`): woken later they would miss its commit, and woken while it
works they would take the interpreter lock from it at each of its calls.

A caller that is interrupted while it waits takes its request back, or passes on the lead if that
was just handed to it; a request is never left with a thread that has gone. Nowhere else can it be
interrupted: by the end of a task it is not (:mod:`tidemill.shield`), and Ctrl-C is put off
(:mod:`tidemill.deferral`).
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import lmdb

from tidemill.brokers.lmdb.pace import pace
from tidemill.crash import point
from tidemill.deferral import begin_waiting, call_off, end_waiting, put_off
from tidemill.errors import TidemillError
from tidemill.gathering import Gathering
from tidemill.shield import lower_shield, raise_shield

__all__ = ["PATIENCE", "Context", "GroupCommit", "Request", "Writing"]

PATIENCE = 30.0
"""Seconds a thread waits for a leader that may be waiting for this thread's own transaction."""


class Context(Protocol):
    """What requests are applied to."""

    def finish(self) -> None:
        """Write what was gathered; called before the commit."""
        ...

    def committed(self) -> None:
        """Called after the commit, before the next one can begin."""
        ...


C = TypeVar("C", bound=Context)
T = TypeVar("T")


class Request:
    """One caller's part of a commit."""

    __slots__ = ("apply", "done", "error", "last", "leads", "result", "turn")

    def __init__(self, apply: Callable[[Any], Any], *, last: bool = False) -> None:
        self.apply = apply
        self.last = last
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.leads = False  # the lead was handed over to its caller
        self.turn = threading.Lock()
        self.turn.acquire()


class GroupCommit:
    """The commits of one environment, as this process makes them.

    ``translated`` makes a driver's error one of ours. In a ``shared`` environment a thread may have
    a write transaction that we know nothing of.
    """

    def __init__(
        self, env: lmdb.Environment, translated: Callable[[Exception], Exception], *, shared: bool
    ) -> None:
        self.env = env
        self.leader = 0  # the thread that has the transaction open
        self.lead = threading.Lock()
        self.pending: collections.deque[Request] = collections.deque()
        self._answered: list[Request] = []  # done, and to be woken
        self._gathering = Gathering()
        self._translated = translated
        self._shared = shared

    def run(
        self,
        make: Callable[[lmdb.Transaction[bytes]], C],
        apply: Callable[[C], T],
        *,
        last: bool = False,
    ) -> T:
        """Run ``apply(make(txn))`` in a write transaction; its result, once that is durable.

        It may be run again when that transaction was dropped. With ``last`` it is applied after all
        that came for the same commit.

        Raises:
            whatever ``apply`` raises, having changed nothing; StoreFull; BrokerUnavailable.
        """
        if self.leader == threading.get_ident():
            raise TidemillError("this call would wait for itself: it was made inside a store step")
        request = Request(apply, last=last)
        deferred = put_off()
        try:
            self._take_part(make, request)
        finally:
            if deferred:
                call_off()
        if request.error is not None:
            raise request.error
        return request.result  # type: ignore[no-any-return]  # what its own function returned

    def _take_part(
        self, make: Callable[[lmdb.Transaction[bytes]], Context], request: Request
    ) -> None:
        raise_shield()
        try:
            self.pending.append(request)
            self._gathering.arrived(len(self.pending))
            if self.lead.acquire(blocking=False) or self._follow(request):
                try:
                    if not request.done:
                        self._lead(make, request)
                finally:
                    self.pass_on()
        finally:
            lower_shield()

    def _follow(self, request: Request) -> bool:
        """Wait for a leader to do the request; True when the lead is handed over instead."""
        try:
            # In the caller's own environment the leader may be waiting for a transaction that this
            # very thread has open; that must not last for ever.
            begin_waiting()
            if not request.turn.acquire(timeout=PATIENCE if self._shared else -1):
                end_waiting()
                raise TidemillError(
                    f"the store was not free for {PATIENCE:g} s; inside a transaction of your own "
                    "pass it as txn="
                )
            end_waiting()
        except BaseException:
            self._leave(request)
            raise
        if not request.leads:
            return False
        self.pending.appendleft(request)
        return True

    def _leave(self, request: Request) -> None:
        """Take back a request whose caller stops waiting."""
        try:
            self.pending.remove(request)
        except ValueError:  # a leader is at it, or has just made us the leader
            if not request.done and not request.leads:  # else we may have had our turn already
                request.turn.acquire()
            if request.leads:
                self.pass_on()

    def _lead(self, make: Callable[[lmdb.Transaction[bytes]], Context], own: Request) -> None:
        """With the lead: one transaction for everything pending once it has begun."""
        batch: list[Request] = []
        writing = Writing(self)
        try:
            try:
                self._gathering.wait(self.pending)
                point("store.begin")
                with writing as txn:
                    point("store.begun")
                    self._drain(batch)
                    context = make(txn)
                    for request in batch:
                        request.result = request.apply(context)
                    context.finish()
                    point("store.commit")
                point("store.committed")
                context.committed()
            except Exception as error:
                if not batch:  # it could not even begin: each who leads shall see for itself
                    self.pending.remove(own)
                    batch.append(own)
                if len(batch) == 1:
                    self._answer(batch[0], self._translated(error))
                else:
                    self._replay(make, batch)
            else:
                for request in batch:
                    self._answer(request)
        except BaseException:  # Ctrl-C in the leader
            if own in self.pending:
                self.pending.remove(own)
            others = [request for request in batch if request is not own and not request.done]
            if writing.committed:
                for request in others:
                    self._answer(request)
            else:  # nothing happened: the others try again
                self.pending.extendleft(reversed(others))
            raise

    def _drain(self, batch: list[Request]) -> None:
        """Take what is pending. The deque is never replaced: an append may be under way."""
        with contextlib.suppress(IndexError):  # somebody has just taken his back
            batch.extend(self.pending.popleft() for _ in range(len(self.pending)))
        batch.sort(key=_is_last)

    def _replay(
        self, make: Callable[[lmdb.Transaction[bytes]], Context], batch: list[Request]
    ) -> None:
        """Each request in a transaction of its own, so that an error hits only its cause."""
        for request in batch:
            try:
                with Writing(self) as txn:
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
        """Hand the lead to somebody who came while the transaction was committed, or give it up.

        Whoever appends a request and then fails to take the lead did so before the release here, so
        that the second look at ``pending`` sees the request.
        """
        while True:
            if self._answered:
                self._gathering.expect(len(self._answered), len(self.pending))
                self._wake()
            with contextlib.suppress(IndexError):  # there is nobody, or he has just gone
                next_one = self.pending.popleft()
                next_one.leads = True
                next_one.turn.release()
                return
            self.lead.release()
            if not self.pending or not self.lead.acquire(blocking=False):
                return


def _is_last(request: Request) -> bool:
    return request.last


class Writing:
    """A write transaction, as a context manager: committed at its end, undone by an error."""

    __slots__ = ("_commits", "_txn", "committed")

    def __init__(self, commits: GroupCommit) -> None:
        self._commits = commits
        self.committed = False

    def __enter__(self) -> lmdb.Transaction[bytes]:
        pace.hurry()
        try:
            self._txn = self._commits.env.begin(write=True)
        except BaseException:
            pace.relax()
            raise
        self._commits.leader = threading.get_ident()
        return self._txn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._commits.leader = 0
        # Before the commit, which gives up the interpreter lock for as long as the disk takes:
        # the threads that compute meanwhile need not be hurried.
        try:
            pace.relax()
        finally:
            if kind is None:
                self._txn.commit()
                self.committed = True
            else:
                self._txn.abort()
