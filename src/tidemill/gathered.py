"""Puts from event loops, gathered: while one commit is under way the next one fills up."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tidemill.deferral import Deferred
from tidemill.gathering import EACH_CLIENT, Gathering
from tidemill.job import Envelope, Put

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["GatheredPuts"]


class _Waiting(NamedTuple):
    envelope: Envelope
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Put]


class GatheredPuts:
    """The asynchronous puts of one app, from all its loops."""

    def __init__(self, mill: Tidemill) -> None:
        self._mill = mill
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._busy = threading.Lock()
        self._gathering = Gathering(EACH_CLIENT)

    async def put(self, envelope: Envelope) -> Put:
        """Store one job."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Put] = loop.create_future()
        self._waiting.append(_Waiting(envelope, loop, future))
        self._gathering.arrived(len(self._waiting))
        if not self._busy.locked():
            self._start()
        return await future

    def _start(self) -> None:
        with Deferred():
            if self._busy.acquire(blocking=False):
                try:
                    self._mill.threads.start(self._work)
                except BaseException:  # no thread to be had
                    self._busy.release()
                    raise

    def after_fork(self) -> None:
        """In a forked child: what waited is the parent's to put."""
        self._waiting.clear()
        self._busy = threading.Lock()
        self._gathering = Gathering(EACH_CLIENT)

    def _work(self) -> None:
        while True:
            try:
                while self._waiting:
                    self._put_all([self._waiting.popleft() for _ in range(len(self._waiting))])
                    # Also when nobody is there yet: to be up is cheaper than to be called again.
                    self._gathering.wait(self._waiting)
            finally:
                self._busy.release()
            # Who appended before the release and found it busy relies on this second look.
            if not self._waiting or not self._busy.acquire(blocking=False):
                return

    def _put_all(self, batch: list[_Waiting]) -> None:
        answers: list[Put | Exception]
        begun = time.monotonic()
        try:
            answers = list(self._mill.broker.put([waiting.envelope for waiting in batch]))
        except Exception:  # all or none: find out whose fault it is
            answers = [self._put_one(waiting.envelope) for waiting in batch]
        self._gathering.expect(len(batch), len(self._waiting), time.monotonic() - begun)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Put], Any]]] = {}
        for waiting, answer in zip(batch, answers, strict=True):
            by_loop.setdefault(waiting.loop, []).append((waiting.future, answer))
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_answer, pairs)

    def _put_one(self, envelope: Envelope) -> Put | Exception:
        try:
            return self._mill.broker.put([envelope])[0]
        except Exception as error:
            return error


def _answer(pairs: list[tuple[asyncio.Future[Put], Any]]) -> None:
    with Deferred():
        for future, answer in pairs:
            if future.cancelled():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
