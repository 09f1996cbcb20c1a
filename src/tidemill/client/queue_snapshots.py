"""The times at which a process stores a snapshot of the totals of queues (:mod:`.queue_rows`).

A worker that has acted in a minute stores a snapshot soon after the minute ends, and a server does
so in every minute. The first of them stores the snapshot; the others find that the minute has one.
The difference of two snapshots counts the jobs in between. An idle worker stores no snapshot.

Two processes may store the snapshot of one minute, if both read before one has written. The last
writer's rows stay. Sums over several minutes are exact all the same.
"""

from __future__ import annotations

import logging

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, MINUTE, HistoryRow
from tidemill.brokers.contract.store import Store
from tidemill.client.queue_rows import ALL_QUEUES, changed_rows, counts_of, latest_of
from tidemill.core.clock import clock
from tidemill.core.errors import BrokerUnavailable, TidemillError

log = logging.getLogger("tidemill")

_LATE = 0.05
"""A snapshot is due this many seconds after its minute, because clocks differ a little."""

_NEEDS = {Feature.HISTORY, Feature.INSPECT}


class QueueSnapshots:
    """The snapshots that one process stores."""

    def __init__(self) -> None:
        self._due = 0.0  # wall time; at once, since later snapshots are compared with the first

    def acted(self) -> None:
        """Record that this process did something with jobs in this minute."""
        self._due = min(self._due, _minute_of(clock.wall()) + MINUTE + _LATE)

    def due_in(self) -> float:
        """Seconds until the next snapshot is due; infinity until the process acts."""
        return max(0.0, self._due - clock.wall())

    def keep(self, broker: Store, *, ending: bool = False) -> None:
        """Store the snapshot that is due, if any: the totals at the end of the minute before now.

        Give ``ending`` when the process ends: then the snapshot of this minute is stored early.

        Raises:
            BrokerUnavailable: the store cannot be reached. The next try comes a minute later.
        """
        now = clock.wall()
        if now < self._due and not (ending and self._due < float("inf")):
            return
        self._due = now + MINUTE
        if broker.features.issuperset(_NEEDS):
            try:
                _store(broker, now, ending)
            except BrokerUnavailable:
                raise
            except TidemillError as error:
                log.warning("the totals of queues are not kept for this minute: %s", error)
        self._due = float("inf")


def _store(broker: Store, now: float, ending: bool) -> None:
    minute = _minute_of(now) - (0 if ending else MINUTE)
    history = with_history(broker, "a snapshot of the queues")
    latest = latest_of(history.history("queue", ALWAYS, 0, 1))
    if not ending and ALL_QUEUES in latest and latest[ALL_QUEUES].at >= minute:
        return  # another process has stored it
    rows = changed_rows(latest, counts_of(broker.stats()), minute)
    if not ending and (rows or not latest):  # after ``ending``, others store this minute again
        rows.append(HistoryRow("queue", ALL_QUEUES, ALWAYS, 0, (minute,)))
    if rows:
        history.keep_history(rows)


def _minute_of(now: float) -> int:
    return int(now) - int(now) % MINUTE
