"""Put batching: concurrent puts from event loops share commits.

While one commit is under way, further puts wait and go into the next commit.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tidemill.core.commit_delay import EACH_CLIENT, CommitDelay
from tidemill.core.envelope import Envelope
from tidemill.core.forks import check_fork
from tidemill.core.job import Put
from tidemill.core.signals import SignalsDeferred

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class _WaitingPut(NamedTuple):
    envelope: Envelope
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Put]


class PutBatching:
    """The asynchronous puts of one app, from all its event loops."""

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill
        self._waiting: collections.deque[_WaitingPut] = collections.deque()
        self._busy = threading.Lock()
        self._commit_delay = CommitDelay(EACH_CLIENT)

    async def put(self, envelope: Envelope) -> Put:
        """Store one job."""
        check_fork()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Put] = loop.create_future()
        self._waiting.append(_WaitingPut(envelope, loop, future))
        self._commit_delay.arrived(len(self._waiting))
        if not self._busy.locked():
            self._start()
        return await future

    def _start(self) -> None:
        with SignalsDeferred():
            if self._busy.acquire(blocking=False):
                try:
                    self._mill.threads.start(self._work)
                except BaseException:  # no thread could be started
                    self._busy.release()
                    raise

    def after_fork(self) -> None:
        """Forget the waiting puts in a forked child: the parent stores them."""
        self._waiting.clear()
        self._busy = threading.Lock()
        self._commit_delay = CommitDelay(EACH_CLIENT)

    def _work(self) -> None:
        while True:
            try:
                while self._waiting:
                    self._put_all([self._waiting.popleft() for _ in range(len(self._waiting))])
                    # Wait even without a pending put: starting a thread again costs more.
                    self._commit_delay.wait(self._waiting)
            finally:
                self._busy.release()
            # A put just before the release saw a busy thread and started none, so check again.
            if not self._waiting or not self._busy.acquire(blocking=False):
                return

    def _put_all(self, batch: list[_WaitingPut]) -> None:
        answers: list[Put | Exception]
        begun = time.monotonic()
        try:
            answers = list(self._mill.broker.put([waiting.envelope for waiting in batch]))
        except Exception:  # no job was stored, so put each job alone: then only bad jobs fail
            answers = [self._put_one(waiting.envelope) for waiting in batch]
        self._commit_delay.expect(len(batch), len(self._waiting), time.monotonic() - begun)
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
    with SignalsDeferred():
        for future, answer in pairs:
            if future.cancelled():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
