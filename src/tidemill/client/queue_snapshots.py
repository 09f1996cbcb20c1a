"""The times at which a process stores a snapshot of the totals of queues (:mod:`.queue_rows`).

A worker or server that has acted in a minute stores a snapshot soon after the minute ends. The
difference of two snapshots counts the jobs in between. A process that does nothing stores no
snapshot.

Several processes may store the snapshot of one minute. Each reads the totals after the minute has
ended, and the last writer's row stays. A late reader also counts jobs of the next minute. Then the
next difference lacks these jobs, so sums over several minutes are exact.
"""

from __future__ import annotations

import itertools
import logging

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, MINUTE
from tidemill.brokers.contract.store import Store
from tidemill.client.queue_rows import (
    ALL_QUEUES,
    changed_rows,
    counts_of,
    latest_of,
    rows_of_all,
)
from tidemill.core.clock import clock
from tidemill.core.errors import BrokerUnavailable, TidemillError

log = logging.getLogger("tidemill")

_LATE = 0.05
"""A snapshot is due this many seconds after its minute, because clocks differ a little."""


_STALE = 30.0
"""Totals read longer ago than this are not stored. The process may have been stopped after the
read, and other processes may have stored later totals since then."""

_AT_ONCE = 150
"""The rows of this many queues are stored in one call, at most 5 rows for each queue. Every store
writes 1,000 rows in one commit. So after a kill, a queue has all its rows or none."""

_NEEDS = {Feature.HISTORY, Feature.INSPECT}
_WHAT = "a snapshot of the queues"


class QueueSnapshots:
    """The snapshots that one process stores. Times are wall time in seconds."""

    def __init__(self) -> None:
        self._first = 0  # the first minute without a snapshot in which the process acted, or 0
        self._last = 0  # the latest minute without a snapshot in which the process acted
        self._began = False
        self._not_before = 0.0  # after a failure: the time of the next try

    def acted(self) -> None:
        """Record that this process did something with jobs in this minute."""
        self._last = _minute_of(clock.wall())
        self._first = self._first or self._last

    def due_in(self) -> float:
        """Seconds until the next snapshot is due; infinity until the process acts."""
        return max(0.0, self._due - clock.wall())

    @property
    def _due(self) -> float:
        if not self._first:
            return float("inf")
        return max(self._first + MINUTE + _LATE, self._not_before)

    def keep(self, broker: Store, *, ending: bool = False) -> None:
        """Store the snapshot that is due, if any.

        The first call also stores the snapshot of the previous minute, unless the store has this
        snapshot. The next snapshot is compared with it. After a failure, the next try comes a
        minute later.

        Give ``ending`` when the process ends: then the snapshot of this minute is stored early.

        Raises:
            BrokerUnavailable: the store cannot be reached.
        """
        now = clock.wall()
        if now < self._not_before and not ending:
            return
        self._not_before = 0.0
        try:
            self._keep(broker, now, ending=ending)
        except (BrokerUnavailable, OSError):
            self._not_before = now + MINUTE
            raise

    def _keep(self, broker: Store, now: float, *, ending: bool) -> None:
        minute = _minute_of(now)
        if not self._began:
            self._begin(broker, minute - MINUTE, now)
        if ending and self._first:
            self._store(broker, minute, now)
        elif now >= self._due:
            self._store(broker, minute - MINUTE, now)
        else:
            return
        self._first = self._last if self._last >= minute else 0

    def keep_if_changed(self, broker: Store, *, ending: bool = False) -> None:
        """Store the snapshot of the last minute if the queues have changed since the minute before.

        A server calls this soon after the end of each minute, because other processes may act in
        its store. With ``ending``, this stores the snapshot of the current minute.

        Raises:
            BrokerUnavailable: the store cannot be reached.
        """
        now = clock.wall()
        minute = _minute_of(now) - (0 if ending else MINUTE)
        if self._began:
            self._store(broker, minute, now, also_unchanged=False)
        else:
            self._begin(broker, minute, now)

    def _begin(self, broker: Store, minute: int, now: float) -> None:
        """Store a snapshot, unless the store has a snapshot of this minute or a later one."""
        self._store(broker, minute, now, again=False)
        self._began = True

    def _store(
        self,
        broker: Store,
        minute: int,
        now: float,
        *,
        again: bool = True,
        also_unchanged: bool = True,
    ) -> None:
        if not broker.features.issuperset(_NEEDS):
            return
        try:
            history = with_history(broker, _WHAT)
            latest = latest_of(history.history("queue", ALWAYS, 0, 1))
            if not again and ALL_QUEUES in latest and latest[ALL_QUEUES].at >= minute:
                return
            counts = counts_of(broker.stats(), now)
            changed = changed_rows(latest, counts, minute)
            if clock.wall() - now > _STALE or not (changed or also_unchanged):
                return
            for start in range(0, len(changed), _AT_ONCE):
                some = changed[start : start + _AT_ONCE]
                history.keep_history([*itertools.chain.from_iterable(some)])
            history.keep_history(rows_of_all(counts.values(), minute))
        except TidemillError as error:
            if isinstance(error, BrokerUnavailable):
                raise
            log.warning("the totals of queues are not kept for this minute: %s", error)


def _minute_of(now: float) -> int:
    return int(now) - int(now) % MINUTE
