"""Waits of callers that are not owners: until jobs have finished, or a queue has room."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.errors import Away
from tidemill.brokers.redis.record import MICRO, read_record
from tidemill.brokers.redis.wakeup import Wakeup
from tidemill.brokers.shared.job_watch import Alarm
from tidemill.core.clock import new_id
from tidemill.core.locks import Lock

_LONGEST = 30.0  # seconds: the longest delay if a broken connection loses a hint
_HOLDS = -2
_SHOWN = 8  # records that one call reads: a record may have a megabyte


class Waits:
    """Places to sleep in one store, kept for the next caller that waits."""

    def __init__(self, lines: ServerConnections) -> None:
        self._lines = lines
        self._lock = Lock()
        self._spare: list[tuple[bytes, Wakeup]] = []

    def ended(self, ids: Sequence[str], timeout: float, alarm: Alarm) -> list[bool]:
        """See :class:`~tidemill.brokers.shared.job_watch.Ends`."""
        names = [job_id.encode() for job_id in ids]
        if not self.until(b"first", names, timeout, alarm):
            return [False] * len(names)
        found: list[bool] = []
        for first in range(0, len(names), _SHOWN):
            shown = self._lines.call("inspect", b"get", *names[first : first + _SHOWN])
            found += [not one or read_record(one).state.finished for one in shown]
        return found

    def until(
        self, verb: bytes, names: Sequence[bytes], timeout: float, alarm: Alarm | None = None
    ) -> bool:
        """Sleep until all jobs have finished, one job has finished, or the queue has room."""
        # ``verb`` says which: ``jobs``, ``first`` or ``space``. False when the time is over, or the
        # alarm rings.
        fds = [] if alarm is None else [alarm.fd]
        deadline = time.monotonic() + timeout
        with self._lock:
            name, sleeper = self._spare.pop() if self._spare else self._new()
        try:
            while True:
                # If this fails, the next call waits longer and raises the error.
                with contextlib.suppress(Away):
                    sleeper.ready()  # subscribe before the store may list the sleeper
                due = int(self._lines.call("waits", verb, name, *names))
                if due == _HOLDS:
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                with contextlib.suppress(Away):
                    longest = min(left, due / MICRO if due >= 0 else _LONGEST, _LONGEST)
                    if sleeper.wait(longest, fds):
                        return False
        finally:
            if verb != b"space":
                with contextlib.suppress(Away):
                    self._lines.call("waits", b"leave", name, *names)
            with self._lock:
                self._spare.append((name, sleeper))

    def _new(self) -> tuple[bytes, Wakeup]:
        name = new_id().encode()
        return name, Wakeup(self._lines.server, self._lines.key + b":w:" + name)

    def close(self) -> None:
        with self._lock:
            spare, self._spare = self._spare, []
        for _, sleeper in spare:
            sleeper.close()

    def after_fork_child(self) -> None:
        """In a forked child: the places belong to the parent; close the copies."""
        self._lock = Lock()
        self.close()
