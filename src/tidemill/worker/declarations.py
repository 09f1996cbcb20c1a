"""A worker stores the options of its tasks, for producers that call the tasks by name.

A worker declares the options when it starts and when it has loaded new code. The latest declaration
of a task counts. A worker whose declarations are unchanged only reads them, in one call. Once a day
a worker renews its declarations. A declaration that no worker has renewed for :data:`KEEP` comes
due, and a worker removes it.

Jobs of a task that no worker knew wait for their next try (:mod:`tidemill.core.verdicts`). A
worker that declares a task for the first time makes these jobs ready at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

from tidemill.brokers.contract.exchange import Reply
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.schedules import DECLARATION, LAST_OWN, Change, Schedule
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock
from tidemill.core.job import State
from tidemill.core.verdicts import waits_for_its_task
from tidemill.errors import BrokerUnavailable, StoreFull, StoreMoved, TidemillError
from tidemill.worker.child_protocol import Hello
from tidemill.worker.parts import Part

log = logging.getLogger("tidemill.worker")

KEEP = 30 * 86_400.0  # seconds for which a declaration is kept after a worker has last renewed it
RENEW = 86_400.0  # seconds after which a worker renews its declarations
AT_ONCE = 1000  # declarations stored in one call
PIECE = 500  # jobs that a worker looks at in one turn, to find those that wait for a new task
WITHOUT_ROOM = 30.0  # seconds until a worker tries again to store declarations that found no room


class TaskDeclarations(Part):
    """The declarations of one worker."""

    rests = True

    def __init__(self) -> None:
        self._hello: Hello | None = None  # the latest
        # The declarations that the worker stored or tried to store.
        self._ours: list[tuple[str, bytes]] = []
        self._stored: list[tuple[str, bytes]] | None = None
        self._again = 0.0  # machine time of the next ``declare``
        self._new: set[str] = set()  # tasks whose waiting jobs are still to be made ready
        self._cursor = ""  # of the search for these jobs

    @property
    def due(self) -> float:  # type: ignore[override]
        if self._hello is None:
            return math.inf
        return 0.0 if self._new or self._hello.declared is not self._ours else self._again

    def look(self, broker: Store) -> None:
        if self._hello is not None and Feature.SCHEDULES in broker.features:
            self.declare(broker, self._hello)
            self.retry_waiting(broker)
        else:
            self._hello = None

    def greet(self, hello: Hello) -> None:
        self._hello = hello

    def after_reply(self, broker: Store, reply: Reply) -> None:
        if reply.schedules:
            reply.schedules, reply.next_due = self.expire(broker, reply.schedules), 0.0

    def declare(self, broker: Store, hello: Hello) -> None:
        """Store the options of the app's tasks, if they are new or a day has passed."""
        ours, now = hello.declared, clock.machine()
        same = ours is self._ours or ours == self._ours
        self._ours = ours
        if (same and now < self._again) or Feature.SCHEDULES not in broker.features:
            return
        self._again = 0.0
        try:
            for first in range(0, len(ours), AT_ONCE):
                part = ours[first : first + AT_ONCE]
                self._new |= _store(broker, part, change=ours != self._stored)
                self._cursor = ""
        except StoreFull as error:
            log.error("the options of the app's tasks are not stored: %s", error)
            self._again = now + WITHOUT_ROOM
            return
        self._stored, self._again = ours, now + RENEW

    def retry_waiting(self, broker: Store) -> None:
        """Make some jobs ready that wait for a task declared for the first time; call it again."""
        if not self._new:
            return
        what = Filter(states=frozenset({State.SCHEDULED}), look=PIECE)
        try:
            page = broker.find(what, PIECE, self._cursor)
            waiting = [it.envelope for it in page.records if waits_for_its_task(it)]
            if ids := [envelope.id for envelope in waiting if envelope.task in self._new]:
                broker.retry(ids, only_scheduled=True)
        except BrokerUnavailable:
            raise
        except TidemillError:  # such as missing rights: the jobs wait for their next try
            self._new.clear()
            return
        self._cursor = page.cursor
        if not page.cursor:
            self._new.clear()

    def forget(self) -> None:
        """Read the store again, which may have lost the declarations."""
        self._again = 0.0

    def expire(self, broker: Store, due: Sequence[Schedule]) -> list[Schedule]:
        """Renew due declarations of this worker, delete other due ones; return the schedules."""
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


def _store(broker: Store, declared: list[tuple[str, bytes]], *, change: bool) -> set[str]:
    """Store some declarations; return the tasks that had none."""
    # Without ``change``, renew stored declarations but keep their content.
    new: set[str] = set()
    while declared:
        records = broker.schedules([f"{DECLARATION}{name}" for name, _ in declared])
        due = clock.wall() + KEEP
        tried: list[tuple[str, bytes]] = []
        changes: list[Change] = []
        for (name, body), old in zip(declared, records, strict=True):
            kept = body if old is None or change else old.body
            if old is None or old.body != kept or old.due < due - RENEW / 2:
                tried.append((name, body))
                version = old.version if old is not None else 0
                changes.append(Change(f"{DECLARATION}{name}", version, due, kept))
            if old is None:
                new.add(name)
        answers = broker.change_schedules(changes) if changes else []
        # Another worker has changed the remaining declarations: read them again.
        declared = [one for one, changed in zip(tried, answers, strict=True) if not changed.done]
    return new
