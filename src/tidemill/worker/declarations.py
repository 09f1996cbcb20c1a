"""A worker stores the options of its tasks, for producers that call the tasks by name.

A worker declares the options when it starts and when it has loaded new code. The latest declaration
of a task counts. A worker whose declarations are unchanged only reads them, in one call. Once a day
a worker renews its declarations. A declaration that no worker has renewed for :data:`KEEP` comes
due, and a worker removes it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.schedules import DECLARATION, LAST_OWN, Change, Schedule
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock
from tidemill.core.errors import StoreFull, StoreMoved
from tidemill.worker.child_protocol import Hello

log = logging.getLogger("tidemill.worker")

KEEP = 30 * 86_400.0
"""Seconds for which a declaration is kept after a worker has last renewed it."""

RENEW = 86_400.0
"""Seconds after which a worker renews its declarations."""

AT_ONCE = 1000
"""Declarations stored in one call."""

WITHOUT_ROOM = 30.0
"""Seconds until a worker tries again to store declarations that found no room."""


class TaskDeclarations:
    """The declarations of one worker."""

    def __init__(self) -> None:
        # The declarations that the worker stored or tried to store.
        self._ours: list[tuple[str, bytes]] = []
        self._stored: list[tuple[str, bytes]] | None = None
        self._again = 0.0  # machine time of the next ``declare``

    def declare(self, broker: Store, hello: Hello) -> None:
        """Store the options of the app's tasks, if they are new or a day has passed.

        Raises:
            BrokerUnavailable: the next call tries again.
        """
        ours, now = hello.declared, clock.machine()
        same = ours is self._ours or ours == self._ours
        self._ours = ours
        if (same and now < self._again) or Feature.SCHEDULES not in broker.features:
            return
        self._again = 0.0
        try:
            for first in range(0, len(ours), AT_ONCE):
                _store(broker, ours[first : first + AT_ONCE], change=ours != self._stored)
        except StoreFull as error:
            log.error("the options of the app's tasks are not stored: %s", error)
            self._again = now + WITHOUT_ROOM
            return
        self._stored, self._again = ours, now + RENEW

    def forget(self) -> None:
        """Have the next ``declare`` read the store, which may have lost the declarations."""
        self._again = 0.0

    def expire(self, broker: Store, due: Sequence[Schedule]) -> list[Schedule]:
        """Renew due declarations of this worker, delete other due records of tidemill's own.

        Returns the schedules.

        Raises:
            BrokerUnavailable: the store hands the same declarations out again.
        """
        expired = [record for record in due if record.name < LAST_OWN]
        if not expired:
            return list(due)
        mine = {f"{DECLARATION}{name}" for name, _ in self._ours}
        changes = [
            Change(old.name, old.version, clock.wall() + KEEP, old.body, gone=old.name not in mine)
            for old in expired
        ]
        with contextlib.suppress(StoreFull, StoreMoved):
            broker.change_schedules(changes)
        gone = [change.name for change in changes if change.gone]
        for name in [name[1:] for name in gone if name.startswith(DECLARATION)]:
            log.info("no worker has declared task %s for %d days", name, KEEP // 86_400)
        return [record for record in due if record not in expired]


def _store(broker: Store, declared: list[tuple[str, bytes]], *, change: bool) -> None:
    """Store some declarations. Without ``change``, renew stored ones but keep their content."""
    while declared:
        records = broker.schedules([f"{DECLARATION}{name}" for name, _ in declared])
        due = clock.wall() + KEEP
        tried: list[tuple[str, bytes]] = []
        changes: list[Change] = []
        for (name, body), old in zip(declared, records, strict=True):
            new = body if old is None or change else old.body
            if old is None or old.body != new or old.due < due - RENEW / 2:
                tried.append((name, body))
                version = old.version if old is not None else 0
                changes.append(Change(f"{DECLARATION}{name}", version, due, new))
        answers = broker.change_schedules(changes) if changes else []
        # Another worker has changed the remaining declarations: read them again.
        declared = [one for one, changed in zip(tried, answers, strict=True) if not changed.done]
