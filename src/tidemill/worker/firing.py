"""Schedules, as a worker's supervisor sees to them: it stores what code declares, and fires.

A step of the conversation hands out what is due (:class:`tidemill.brokers.base.Reply`); the next
time and the job follow from the record alone, and one call stores both. Whoever is killed before
that call has done nothing, and another worker is handed the same a second later; after it, all is
done.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tidemill.brokers.base import Broker, Feature, need
from tidemill.brokers.limiting import declare_limit
from tidemill.brokers.schedules import Change, Changed, LeftOut, Schedule
from tidemill.clock import machine_time, wall_time
from tidemill.crash import point
from tidemill.errors import CodecError, StoreFull, StoreMoved
from tidemill.schedules import stored as kept
from tidemill.worker.wire import Hello

__all__ = ["AT_ONCE", "Firing"]

log = logging.getLogger("tidemill.worker")

AT_ONCE = 500
"""Schedules fired in one step."""

UNREADABLE = 60.0
"""Seconds after which a record that this version cannot read is looked at again."""

WITHOUT_ROOM = 30.0
"""Seconds after which the app's schedules are stored that found no room."""

_WHY = {
    LeftOut.ID: "a job has its id",
    LeftOut.KEY: "a job has its key",
    LeftOut.FULL: "its queue is full",
}


class Firing:
    """The schedules of one worker. ``app`` is its app as the command line names it, if any."""

    def __init__(self, app: str = "") -> None:
        self._app = app.partition(":")[0].removesuffix(".py")
        self._stored: Sequence[tuple[str, bytes]] | None = None  # what was declared last
        self._again = 0.0  # machine time; before it there is no room

    def count(self, broker: Broker) -> int:
        """How many due schedules to ask for."""
        return AT_ONCE if Feature.SCHEDULES in broker.features else 0

    # -- firing ---------------------------------------------------------------------------------

    def fire(self, broker: Broker, due: Sequence[Schedule], wall: float = 0.0) -> None:
        """Put the jobs of schedules that are due, and set their next times.

        ``wall`` is the wall time they are due by; else this machine's clock may not have come so
        far, or be beyond, and the next times would not be those of who hands them out.

        Raises:
            BrokerUnavailable: it may not have happened; who is handed them next sees.
        """
        now = wall or wall_time()
        changes = [_fired(schedule, now) for schedule in due]
        point("worker.firing")
        try:
            answers = broker.change_schedules(changes)
        except StoreFull as error:
            log.error("%d schedule(s) wait for room: %s", len(changes), error)
            return
        except StoreMoved:
            return
        point("worker.fired")
        for change, changed in zip(changes, answers, strict=True):
            _tell(change, changed)

    # -- what code declares ---------------------------------------------------------------------

    def declare(self, broker: Broker, hello: Hello) -> None:
        """Store what the app declares, and remove what it no longer does.

        Raises:
            FeatureMissing: it declares schedules, and the broker has none.
            BrokerUnavailable: the next call tries again.
        """
        if hello.schedules == self._stored or machine_time() < self._again:
            return
        if hello.schedules:
            need(broker, Feature.SCHEDULES, "a schedule")
        if Feature.SCHEDULES in broker.features:
            try:
                for name, body in hello.schedules:
                    self._declare(broker, name, body)
                self._remove_others(broker, {name for name, _ in hello.schedules})
            except StoreFull as error:
                log.error("the schedules of the app are not stored: %s", error)
                self._again = machine_time() + WITHOUT_ROOM
                return
        self._stored = hello.schedules

    def _declare(self, broker: Broker, name: str, body: bytes) -> None:
        while True:
            (old,) = broker.schedules([name])
            new = kept.decode(body)
            new.app = self._app
            try:
                change = kept.declared(name, new, old, wall_time())
            except CodecError as error:
                log.error("schedule %r stays as it is: %s", name, error)
                return
            if change is None:
                return
            declare_limit(broker, new.job.limit)
            if broker.change_schedules([change])[0].done:
                log.info("schedule %r is %s", name, "stored" if old is None else "changed")
                return

    def _remove_others(self, broker: Broker, names: set[str]) -> None:
        """Remove what this app declared once and does no longer."""
        after = ""
        while self._app and (page := broker.list_schedules(after, AT_ONCE)):
            after = page[-1].name
            for schedule in page:
                if schedule.name in names or _app_of(schedule) != self._app:
                    continue
                change = Change(schedule.name, schedule.version, gone=True)
                if broker.change_schedules([change])[0].done:
                    log.info(
                        "schedule %r is no longer declared in %s and is removed",
                        schedule.name,
                        self._app,
                    )


def _app_of(schedule: Schedule) -> str:
    """The app whose code declares it; empty when none does."""
    try:
        return kept.decode(schedule.body).app
    except CodecError:
        return ""


def _fired(schedule: Schedule, now: float) -> Change:
    try:
        return kept.fired(schedule, now)
    except Exception as error:  # of a later version, or of a zone that this machine lacks
        log.error(
            "schedule %r cannot be fired here, and is left for %g s: %s: %s",
            schedule.name,
            UNREADABLE,
            type(error).__name__,
            error,
        )
        return Change(schedule.name, schedule.version, now + UNREADABLE, schedule.body)


def _tell(change: Change, changed: Changed) -> None:
    if changed.done and change.jobs:
        log.debug("schedule %r fired %d job(s)", change.name, len(change.jobs))
    for why in changed.left_out:
        level = logging.DEBUG if why == LeftOut.KEY else logging.WARNING
        log.log(level, "schedule %r: a job was left out: %s", change.name, _WHY.get(why, why))
