"""Scheduling in a supervisor: it stores the schedules that code declares, and fires due ones.

The reply to a step brings due schedules (:class:`tidemill.brokers.contract.exchange.Reply`). The
worker computes the next time and the job from the record alone, and stores both by one call. If the
worker is killed before this call, nothing is stored: another worker gets the same schedules a
second later.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.limits import declare_limit
from tidemill.brokers.contract.schedules import LAST_OWN, Change, Changed, LeftOut, Schedule
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock
from tidemill.core.crash_points import point
from tidemill.errors import BrokerUnavailable, CodecError, StoreFull, StoreMoved
from tidemill.schedules import record as kept
from tidemill.worker.child_protocol import Hello
from tidemill.worker.parts import Part

log = logging.getLogger("tidemill.worker")

AT_ONCE = 1000
"""The most schedules fired in one step. Each step costs two commits: one to hand the schedules out,
one to fire."""

UNREADABLE = 60.0  # seconds until the next try to fire a schedule that this worker cannot fire
WITHOUT_ROOM = 30.0  # seconds until a worker tries again to store schedules that found no room
CLOCK_EVERY = 60.0  # seconds between two looks at the store's clock
_PAGE = 1000

_WHY = {
    LeftOut.ID: "another job has the same id",
    LeftOut.KEY: "another job has the same key",
    LeftOut.FULL: "its queue is full",
}


class Scheduling(Part):
    """The schedules of one worker.

    ``app`` is the app as the command line names it, if any. ``owner`` is the worker's id with the
    broker; the worker attaches before it declares. A declaration without an owner does not count as
    the declaration of a living worker.
    """

    rests = True

    def __init__(self, app: str = "", owner: str = "") -> None:
        self._owner = owner
        self._app = app.partition(":")[0].removesuffix(".py")
        self._stored: Sequence[tuple[str, bytes]] | None = None  # the latest stored declaration
        self._hello: Hello | None = None  # the latest
        self._declare_at = math.inf  # machine time of the next declaration
        self._fires = 0  # the number of due schedules to ask for
        self._again = 0.0  # machine time of the next try after a full store
        self._next_look = 0.0  # machine time of the next look at the store's clock
        self._has_some = False  # True when the store had schedules at the last look
        self._ahead = math.inf  # seconds by which that clock was ahead of machine time

    @property
    def due(self) -> float:  # type: ignore[override]
        return min(self._declare_at, self._next_look) if self._has_some else self._declare_at

    def look(self, broker: Store) -> None:
        """Store the schedules of the app. Before that, look at the store's clock."""
        self._fires = AT_ONCE if Feature.SCHEDULES in broker.features else 0
        self.look_at_clock(broker)
        if self._hello is not None and clock.machine() >= self._declare_at:
            self.declare(broker, self._hello)
            stored = self._stored == self._hello.schedules
            self._declare_at = math.inf if stored else self._again

    def greet(self, hello: Hello) -> None:
        self._hello, self._declare_at = hello, 0.0

    def before_step(self, step: Step) -> None:
        step.fires = self._fires

    def after_reply(self, broker: Store, reply: Reply) -> None:
        """Fire due schedules, and look at once for the jobs that they put."""
        self.look_at_clock(broker)
        if reply.schedules:
            reply.next_due = 0.0
            self.fire(broker, reply.schedules)

    def forget(self) -> None:
        """Store all schedules again: the broker may have lost some."""
        self._stored, self._declare_at = None, 0.0

    def fire(self, broker: Store, due: Sequence[Schedule]) -> None:
        """Put the jobs of schedules that are due, and set their next times by the store's clock."""
        # After BrokerUnavailable perhaps nothing is stored; then another worker gets the schedules.
        now = broker.wall()
        lives = self._lives_by(broker)
        changes = [_fired(schedule, now, lives) for schedule in due]
        point("worker.firing")
        try:
            answers = broker.change_schedules(changes)
        except StoreFull as error:
            log.error("%d schedule(s) wait for room: %s", len(changes), error)
            return
        except StoreMoved:
            return
        point("worker.fired")
        log.debug("%d schedule(s) fired", sum(changed.done for changed in answers))
        for schedule, change, changed in zip(due, changes, answers, strict=True):
            _tell(schedule, change, changed, now)

    def _lives_by(self, broker: Store) -> kept.Lives:
        """A function that tells whether any of the given owners lives; it asks the broker once."""
        # Every worker attaches before it declares. This worker reads the records first, then the
        # owners. So the owners include each living worker whose declaration is in the records.
        alive: set[str] = set()

        def lives(owners: Collection[str]) -> bool:
            if self._owner in owners:
                return True
            if not alive:
                alive.update(owner.id for owner in broker.owners())
            return not alive.isdisjoint(owners)

        return lives

    def look_at_clock(self, broker: Store) -> None:
        """Set next times anew if the store's clock was set back; this looks once a minute."""
        # The first look may follow a change of the clock while no worker ran.
        machine = clock.machine()
        if machine < self._next_look:
            return
        if Feature.SCHEDULES in broker.features:
            now = broker.wall()
            if now - machine < self._ahead - kept.SKEW:
                self._restore(broker, now)
            self._ahead = now - machine
            self._has_some = bool(broker.list_schedules(LAST_OWN, 1))
        self._next_look = machine + CLOCK_EVERY

    def _restore(self, broker: Store, now: float) -> None:
        after = LAST_OWN
        while page := broker.list_schedules(after, _PAGE):
            after = page[-1].name
            changes = [change for record in page if (change := _restored(record, now))]
            answers: Sequence[Changed] = ()
            with contextlib.suppress(StoreFull, StoreMoved):
                answers = broker.change_schedules(changes) if changes else ()
            for change, changed in zip(changes, answers, strict=False):
                if changed.done:
                    log.warning("schedule %r goes on from now: the clock was set back", change.name)

    def declare(self, broker: Store, hello: Hello) -> None:
        """Store the schedules of the app, and withdraw those that it declares no longer."""
        if hello.schedules == self._stored or clock.machine() < self._again:
            return
        if hello.schedules:
            need(broker, Feature.SCHEDULES, "a schedule")
        if Feature.SCHEDULES in broker.features:
            names = {name for name, _ in hello.schedules}
            try:
                self._declare(broker, hello.schedules)
                for name in [name for name, _ in self._stored or () if name not in names]:
                    self._withdraw(broker, name)
            except StoreFull as error:
                log.error("the schedules of the app are not stored: %s", error)
                self._again = clock.machine() + WITHOUT_ROOM
                return
        self._stored = hello.schedules

    def _declare(self, broker: Store, schedules: Sequence[tuple[str, bytes]]) -> None:
        left = list(schedules)
        alive = {owner.id: owner.name for owner in broker.owners()} if left else {}
        while left:
            batch, left = left[:AT_ONCE], left[AT_ONCE:]
            left += self._declare_some(broker, batch, alive)

    def _declare_some(
        self, broker: Store, batch: list[tuple[str, bytes]], alive: Mapping[str, str]
    ) -> list[tuple[str, bytes]]:
        """Store a batch; return the schedules that another worker changed, to try again."""
        tried: list[tuple[str, bytes]] = []
        changes: list[Change] = []
        effects: list[str] = []
        records = broker.schedules([name for name, _ in batch])
        now = broker.wall()
        for (name, body), old in zip(batch, records, strict=True):
            new = kept.decode(body)
            new.app = self._app
            try:
                change = kept.declared(name, new, old, now, owner=self._owner, alive=alive.keys())
                differs = old is None or kept.differs(new, old)
            except CodecError as error:
                log.error("schedule %r stays as it is: %s", name, error)
                continue
            if change is None:
                continue
            if differs:
                declare_limit(broker, new.job.limit)
                self._tell_others(name, old, alive)
            tried.append((name, body))
            changes.append(change)
            effects.append(("stored" if old is None else "changed") if differs else "")
        again = []
        answers = broker.change_schedules(changes) if changes else []
        for declared, did, changed in zip(tried, effects, answers, strict=True):
            if not changed.done:
                again.append(declared)
            elif did:
                log.info("schedule %r is %s", declared[0], did)
        return again

    def _tell_others(self, name: str, old: Schedule | None, alive: Mapping[str, str]) -> None:
        """Log that a living worker, with another version or app, declares ``name`` differently."""
        others = kept.decode(old.body).declarers if old is not None else None
        names = [alive[o] for o in others or () if o in alive and o != self._owner]
        if names:
            log.warning(
                "schedule %r is declared otherwise by worker %s, and is changed: the latest "
                "declaration holds; if that worker runs another app, rename one of the schedules",
                name,
                names[0],
            )

    def _withdraw(self, broker: Store, name: str) -> None:
        while True:
            (record,) = broker.schedules([name])
            change = kept.withdrawn(record, self._owner) if record is not None else None
            if change is None:
                return
            if broker.change_schedules([change])[0].done:
                log.info("schedule %r is no longer declared by this worker", name)
                return


def _fired(schedule: Schedule, now: float, lives: kept.Lives) -> Change:
    try:
        return kept.fired(schedule, now, lives)
    except BrokerUnavailable:
        raise
    # A newer release wrote the record, or this machine does not know its time zone.
    except Exception as error:
        log.error(
            "schedule %r cannot be fired here; the next try is in %g s: %s: %s",
            schedule.name,
            UNREADABLE,
            type(error).__name__,
            error,
        )
        return Change(schedule.name, schedule.version, now + UNREADABLE, schedule.body)


def _restored(record: Schedule, now: float) -> Change | None:
    try:
        return kept.restored(record, now)
    except Exception:  # its firing names the reason
        return None


def _tell(schedule: Schedule, change: Change, changed: Changed, now: float) -> None:
    first = change.jobs[0].planned if change.jobs else None
    if changed.done and first is not None and first.time > schedule.due:
        log.warning(
            "schedule %r has missed too many times: only about the last %d get a job",
            change.name,
            kept.MOST_MISSED,
        )
    if changed.done and not change.jobs and change.due == now + kept.FORGET:
        log.warning(
            "schedule %r fires no more: no living worker declares it; it goes on when a worker "
            "declares it again, or is removed in %d days",
            change.name,
            kept.FORGET // 86_400,
        )
    elif changed.done and not change.jobs and change.gone:
        log.info("schedule %r is removed: no worker has declared it for long", change.name)
    for why in changed.left_out:
        level = logging.DEBUG if why == LeftOut.KEY else logging.WARNING
        log.log(level, "schedule %r: a job was left out: %s", change.name, _WHY.get(why, why))
