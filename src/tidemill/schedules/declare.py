"""``mill.schedules``: declare schedules in code, or add and change them at run time.

The supervisor of a starting worker stores the schedules of the code. A schedule that a person adds
is stored at once. Workers fire schedules; this module does not.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.limits import declare_limit
from tidemill.brokers.contract.schedules import LAST_OWN, Change
from tidemill.brokers.contract.schedules import Schedule as Record
from tidemill.client.job_handle import Job
from tidemill.client.task import Call
from tidemill.client.threads import in_thread
from tidemill.core.codec import sign
from tidemill.core.config import check_name
from tidemill.core.envelope import Envelope, Planned
from tidemill.core.suggest import hint
from tidemill.errors import (
    CodecError,
    InvalidOption,
    ScheduleExists,
    ScheduleNotFound,
    ScheduleOver,
)
from tidemill.schedules import record as kept
from tidemill.schedules.parse import ScheduleOptions, Timing, When, naming, when_of
from tidemill.schedules.record import Stored
from tidemill.schedules.rules import Rule, moment_of, times
from tidemill.schedules.words import in_words

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

T = TypeVar("T")
PAGE = 500

_Declared = tuple[Call[Any], When]
_UNREAD = "?"  # shown as the task of a schedule that another version wrote
_AS_STORED = ("fired", "jitter", "catch_up", "paused", "ended", "code", "app")


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it is now.

    Attributes:
        name: the name of the schedule.
        task, queue: the task and queue of its jobs.
        arguments: the arguments of its jobs, as text.
        when: its rule, as text.
        next: the next time, without jitter; None when the schedule is paused or has ended.
        last: the time of its latest job.
        last_job: the id of that job, which may be deleted meanwhile; None before the first job.
        fired: the number of jobs that it has put.
        repeats: the number of jobs after which it ends; None for no limit.
        jitter: seconds.
        catch_up: True when it puts a job for each missed time.
        paused: True when it does not fire until somebody resumes it.
        ended: True when it never fires again.
        code: True when code declares it; ``app`` names the app of that code, if known.
        declared: True when a living worker declares it; None when no worker ever declared it.
        undeclared: the time since which the schedule does not fire, because no living worker
            declares it; None for a schedule that fires.
        known: False when neither this app nor a worker has its task; None in an app without tasks.
    """

    name: str
    task: str
    queue: str
    arguments: str
    when: str
    next: dt.datetime | None
    last: dt.datetime | None
    last_job: str | None
    fired: int
    repeats: int | None
    jitter: float
    catch_up: bool
    paused: bool
    ended: bool
    code: bool
    app: str
    declared: bool | None
    undeclared: dt.datetime | None
    known: bool | None

    def public(self) -> dict[str, Any]:
        """The schedule as plain data for programs: times as epoch seconds."""
        values: dict[str, Any] = {
            name: getattr(self, name) for name in type(self).__struct_fields__
        }
        for field in ("next", "last", "undeclared"):
            moment: dt.datetime | None = values[field]
            values[field] = moment.timestamp() if moment else None
        return values


class DeclaredSchedules:
    """The schedules that the code of an app declares; a starting worker stores them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._declared: dict[str, _Declared] = {}
        self._of_tasks: set[str] = set()

    def declare(
        self,
        name: str,
        call: Call[Any],
        when: Timing | None = None,
        /,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Declare a schedule: see :meth:`Tidemill.schedule`."""
        check_name("schedule name", name)
        new = _checked(name, call), when_of(when, options)
        self._runtime.features.need_if_known(Feature.SCHEDULES, "a schedule")
        before = self._declared.get(name)
        is_prompt = hasattr(sys, "ps1")  # or a notebook: people often repeat and change there
        if before is not None and not _is_same(before, new) and not is_prompt:
            raise InvalidOption(
                f"schedule {name!r} is declared twice, as {_in_words(before)} and as "
                f"{_in_words(new)}; give one another name"
            )
        self._declared[name] = new
        self._of_tasks.discard(name)

    def declare_own(self, name: str, call: Call[Any], when: Timing) -> None:
        """Declare the schedule of a task, which replaces an earlier schedule of the task."""
        if name in self._of_tasks:
            del self._declared[name]
        self.declare(name, call, when)
        self._of_tasks.add(name)

    def bodies(self) -> list[tuple[str, bytes]]:
        """The names of the schedules in code, with the bodies of their records."""
        found = list[tuple[str, bytes]]()
        for name, (call, when) in self._declared.items():
            with naming(name):
                found.append(
                    (name, kept.encode(_stored(self._runtime, name, call, when, code=True)))
                )
        return found


class Schedules:
    """The schedules of an app: ``for schedule in mill.schedules: …``.

    ``get pause resume retime remove run next_times`` raise ``ScheduleNotFound`` for an unknown
    name.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def add(
        self,
        name: str,
        call: Call[Any],
        when: Timing | None = None,
        /,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule:
        """Add a schedule now; arguments as for :meth:`Tidemill.schedule`.

        Raises:
            ScheduleExists: a schedule has this name.
            ScheduleOver: the schedule would never fire.
            InvalidOption: another value is wrong.
        """
        check_name("schedule name", name)
        stored = _stored(self._runtime, name, _checked(name, call), when_of(when, options))
        change = kept.added(name, stored, self._broker.wall())
        if stored.ended:
            raise ScheduleOver(f"schedule {name!r} would never fire: its time is past")
        declare_limit(self._broker, stored.job.limit)
        (changed,) = self._broker.change_schedules([change])
        if not changed.done:
            raise ScheduleExists(
                f"there is a schedule {name!r} already; remove it first, or take another name"
            )
        return self._shown(Record(name, changed.version, change.due, change.body))

    def __iter__(self) -> Iterator[Schedule]:
        """All schedules, by name."""
        after, alive = LAST_OWN, self._alive()
        while page := self._broker.list_schedules(after, PAGE):
            yield from self._all_shown(page, alive)
            after = page[-1].name

    def get(self, name: str) -> Schedule:
        """One schedule.

        Raises:
            ScheduleNotFound: no schedule has this name.
        """
        return self._shown(self._record(name))

    def pause(self, name: str) -> Schedule:
        """Stop a schedule until it is resumed."""
        return self._change(name, lambda old: kept.paused(self._found(name, old)))

    def resume(self, name: str) -> Schedule:
        """Let a schedule go on from now; times that passed meanwhile are skipped.

        A schedule without a time left has ended, and is removed unless code declares it.
        """
        now = self._broker.wall()
        return self._change(name, lambda old: kept.resumed(self._found(name, old), now))

    def retime(self, name: str, when: Timing) -> Schedule:
        """Give a schedule other times, from now on; repeats, jitter and job stay.

        Code that declares the schedule sets its own times again when a worker starts.

        Raises:
            ScheduleOver: the schedule would never fire.
            InvalidOption: a value is wrong.
        """
        new, now = when_of(when, {}), self._broker.wall()
        if not times(new.rule, now, 1) and not new.rule.counts_from_start:
            raise ScheduleOver(f"schedule {name!r} would never fire: its time is past")
        return self._change(
            name, lambda old: kept.retimed(self._found(name, old), new.rule, new.said, now)
        )

    def remove(self, name: str) -> None:
        """Remove a schedule. Its jobs stay. The next worker stores it again if code declares it."""
        while True:
            change = Change(name, self._record(name).version, gone=True)
            if self._broker.change_schedules([change])[0].done:
                return

    def run(self, name: str) -> Job[Any]:
        """Put the job of a schedule once more, now; the times of the schedule stay."""
        now = self._broker.wall()
        job = kept.job_of(kept.decode(self._record(name).body), now, now)
        handle: Job[Any] = self._runtime.put([job])[0]
        return handle

    def next_times(self, name: str, count: int = 5) -> list[dt.datetime]:
        """The next times that get a job, without jitter; none for a schedule that does not fire.

        A time that passed while no worker ran is among them: its job follows when a worker runs.
        """
        stored = kept.decode(self._record(name).body)
        found = kept.next_times(stored, self._broker.wall(), count)
        return [moment_of(stored.rule, when) for when in found]

    # -- asyncio --------------------------------------------------------------------------------

    aadd = in_thread(add)

    async def alist(self) -> list[Schedule]:
        """All schedules, by name, without blocking the event loop."""
        return await self._runtime.threaded(lambda: [*self])

    aget = in_thread(get)
    apause = in_thread(pause)
    aresume = in_thread(resume)
    aretime = in_thread(retime)
    aremove = in_thread(remove)
    arun = in_thread(run)

    # -- records --------------------------------------------------------------------------------

    @property
    def _broker(self) -> Any:
        self._runtime.features.need(Feature.SCHEDULES, "a schedule")
        return self._runtime.broker

    def _record(self, name: str) -> Record:
        return self._found(name, self._broker.schedules([name])[0])

    def _found(self, name: str, record: Record | None) -> Record:
        if record is None:
            known = [row.name for row in self._broker.list_schedules("", PAGE)]
            raise ScheduleNotFound(f"there is no schedule {name!r}; {hint(name, known)}")
        return record

    def _change(self, name: str, make: Callable[[Record | None], Change | None]) -> Schedule:
        """Change a record, also when others change it at the same time."""
        while True:
            record = self._broker.schedules([name])[0]
            change = make(record)
            if change is None:
                return self._shown(self._found(name, record))
            (changed,) = self._broker.change_schedules([change])
            if changed.done:
                return self._shown(Record(name, changed.version, change.due, change.body))

    def _alive(self) -> set[str]:
        return {owner.id for owner in self._broker.owners()}

    def _shown(self, record: Record) -> Schedule:
        return next(self._all_shown([record]))

    def _all_shown(
        self, records: list[Record], alive: set[str] | None = None
    ) -> Iterator[Schedule]:
        found, known = [_opened(record) for record in records], None
        if self._runtime.tasks:
            known = self._runtime.declarations.known(stored.job.task for stored in found)
        for record, stored in zip(records, found, strict=True):
            job, rule = stored.job, stored.rule
            idle = stored.paused or stored.ended or bool(stored.undeclared)
            declared = None
            if (declarers := stored.declarers) is not None:
                declared = not (self._alive() if alive is None else alive).isdisjoint(declarers)
            yield Schedule(
                name=record.name,
                task=job.task,
                queue=job.queue,
                arguments=job.text,
                when=in_words(rule),
                next=None if idle else moment_of(rule, stored.planned),
                last=moment_of(rule, stored.last) if stored.last else None,
                last_job=stored.last_job or None,
                repeats=stored.repeats or None,
                declared=declared,
                undeclared=moment_of(rule, stored.undeclared) if stored.undeclared else None,
                known=None if known is None or job.task == _UNREAD else job.task in known,
                **{name: getattr(stored, name) for name in _AS_STORED},
            )


def _opened(record: Record) -> Stored:
    try:
        return kept.decode(record.body)
    except CodecError:  # another version wrote this record, and its workers fire the schedule
        rule, job = Rule(at=record.due or 1.0), Envelope(id="", task=_UNREAD)
        return Stored(rule=rule, job=job, planned=record.due)


def matches(
    runtime: Runtime, name: str, call: Call[Any], **options: Unpack[ScheduleOptions]
) -> bool:
    """True when the stored schedule of this name equals the schedule of these arguments.

    Raises:
        ScheduleNotFound: no schedule has this name.
    """
    stored = _stored(runtime, name, _checked(name, call), when_of(None, options))
    return kept.is_the_same(stored, runtime.schedules._record(name))


def _stored(
    runtime: Runtime, name: str, call: Call[Any], when: When, *, code: bool = False
) -> Stored:
    return Stored(
        rule=when.rule,
        job=signed_job(runtime, name, call),
        repeats=when.repeats,
        jitter=when.jitter,
        catch_up=when.catch_up,
        said=when.said,
        code=code,
    )


def signed_job(runtime: Runtime, name: str, call: Call[Any]) -> Envelope:
    """The job of a schedule, signed for this schedule."""
    job = runtime.envelope(call)
    job.id, job.created, job.planned = "", 0.0, Planned(name)
    if runtime.keys:
        job.signature = sign(job, runtime.keys[0])
    return job


def _checked(name: str, call: Any) -> Call[Any]:
    if not isinstance(call, Call):
        raise InvalidOption(f"schedule {name!r} takes task.call(…), not {call!r}")
    if call.missing is not None:
        raise InvalidOption(
            f"schedule {name!r}: {call.missing}; give the arguments in task.call(…)"
        )
    if call.hooks:
        raise InvalidOption(
            f"schedule {name!r} takes a single call; schedule a task that enqueues the rest"
        )
    for option in ("id", "at", "txn"):
        if getattr(call.options, option):
            raise InvalidOption(
                f"schedule {name!r} makes many jobs; leave {option}= out of its call"
            )
    return call


def _is_same(one: _Declared, other: _Declared) -> bool:
    """True when two declarations are equal, for example because a file was run twice."""
    (call, when), (call2, when2) = one, other
    return (call.task, call.args, call.kwargs, call.options, when) == (
        *(call2.task, call2.args, call2.kwargs, call2.options, when2),
    )


def _in_words(declared: _Declared) -> str:
    call, when = declared
    return f"{call!r} {in_words(when.rule)}"
