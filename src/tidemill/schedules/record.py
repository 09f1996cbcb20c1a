"""The record of a schedule, and its changes: declared, fired, paused, ended.

Apart from job ids and jitter, each function depends only on the record and the given time. So all
workers with the same due schedule compute the same change. The broker accepts the change of one
worker.

    due ──(fired)──► due ──► … ──► ended: no time is left, or no repeat
     ▲ │
     │ ├──(paused)──► paused ──────(resumed)──┐
     │ └──(no living declarer)──► undeclared ──(30 days)──► deleted
     └───────────────────────────────────(declared)──┘

The record of a schedule in code lists its declarers: the workers that declared it. The schedule
fires while a declarer lives; any worker may fire it. The name of the app plays no part in this, and
no worker removes a schedule of another worker. So two apps with one name, or two versions of an
app, never remove each other's schedules.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Collection

import msgspec

from tidemill.brokers.contract.schedules import Change, Schedule
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope, Planned
from tidemill.errors import CodecError
from tidemill.schedules.rules import Rule, next_time, times

AT_ONCE = 100  # one step puts jobs for at most this many missed times
MOST_MISSED = 10_000  # with ``catch_up``, about this many missed times get a job: the latest
DAY = 86_400.0

FORGET = 30 * 86_400.0  # seconds after which a schedule without a living declarer is removed
SKEW = 60.0  # seconds by which the clocks of machines that share a store may differ
Lives = Callable[[Collection[str]], bool]  # true when any of these owners is alive

ABOUT = 10.0  # seconds by which a time relative to ``datetime.now()`` may be off


class Stored(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The body of a schedule's record. Times are wall time, 0 for none.

    Attributes:
        rule: the rule of the times. An interval or a calendar period without a ``start``
            (``unanchored``) counts from the moment when the schedule was first stored.
        job: the job to put, without id and time.
        repeats: the number of jobs after which the schedule ends; 0 for no limit. Jobs that the
            broker left out (``LeftOut``) do not count.
        jitter: the most seconds by which a job is late.
        catch_up: True to put a job for each missed time.
        planned: the next time. The due time of the record is this time plus the jitter.
        fired: the number of jobs so far. Jobs that the broker left out count only if ``repeats`` is
            0.
        last: the time of the latest job.
        last_job: the id of the latest job, also if the broker left this job out.
        paused: True when somebody has paused the schedule.
        app: the app whose code declares the schedule, as in the worker's command line; only for
            display.
        code: True when code declares the schedule.
        declarers: the workers that declared the schedule, which fires only while one of them is
            alive. None for a schedule that no worker declared, which always fires.
        undeclared: the time since which the schedule does not fire, because no declarer is alive.
        said: the time at which a user gave the ``start``, ``end`` or ``at`` of the rule; 0 for
            none.
    """

    rule: Rule
    job: Envelope
    unanchored: bool = False
    repeats: int = 0
    jitter: float = 0.0
    catch_up: bool = False
    planned: float = 0.0
    fired: int = 0
    last: float = 0.0
    last_job: str = ""
    paused: bool = False
    app: str = ""
    code: bool = False
    declarers: tuple[str, ...] | None = None
    undeclared: float = 0.0
    said: float = 0.0

    @property
    def ended(self) -> bool:
        """True when the schedule never fires again."""
        return not self.planned


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Stored).decode


def decode(body: bytes) -> Stored:
    """Decode the body of a record. Raises CodecError for a record of another version."""
    try:
        return _decode(body)
    except msgspec.MsgspecError as error:
        raise CodecError(f"it was stored by another version of tidemill: {error}") from error


def added(name: str, new: Stored, now: float) -> Change:
    """The change that makes a new record. A schedule without a time left has ended at once."""
    _begin(new, now)
    return _to(name, 0, new)


def declared(
    name: str,
    new: Stored,
    old: Schedule | None,
    now: float,
    *,
    owner: str = "",
    alive: Collection[str] = (),
) -> Change | None:
    """The change that makes a record equal to the code; None when it is equal already.

    With the same rule, the next time and all counters stay. A paused schedule stays paused. A
    worker (``owner``) joins the declarers that are ``alive``. A worker always makes a change, so
    that the version of the record rises. Another worker may just have found no living declarer. The
    broker refuses that worker's change, because it was made for the old version.
    """
    was = decode(old.body) if old is not None else None
    new.declarers = was.declarers if was is not None else None
    if owner:
        new.declarers = *(o for o in new.declarers or () if o in alive and o != owner), owner
    if old is None or was is None:
        return added(name, new, now)
    new.app = new.app or was.app
    new.paused = was.paused
    if not _is_same(new, was, now):
        _begin(new, now)
        return _to(name, old.version, new)
    new.rule, new.unanchored, new.said = was.rule, was.unanchored, was.said
    new.planned, new.fired = was.planned, was.fired
    new.last, new.last_job = was.last, was.last_job
    if was.planned and _is_set_back(new, now):
        _resume(new, now)
        return _to(name, old.version, new)
    body = encode(new)
    if body == old.body and not owner:
        return None
    return Change(name, old.version, due_of(new) if was.undeclared else old.due, body)


def differs(new: Stored, old: Schedule) -> bool:
    """True when a declaration changes the record, apart from its declarers."""
    was = decode(old.body)
    was.declarers, was.undeclared = new.declarers, new.undeclared
    return encode(was) != encode(new)


def is_the_same(new: Stored, old: Schedule) -> bool:
    """True when the store has this schedule already: the same job and times, and not from code."""
    was = decode(old.body)
    if was.code:
        return False
    one, other = (
        (stored.repeats, stored.jitter, stored.catch_up, _as_given(stored), _unsigned(stored.job))
        for stored in (new, was)
    )
    return one == other


def withdrawn(record: Schedule, owner: str) -> Change | None:
    """The change that removes a worker from the declarers; None when the worker is no declarer."""
    stored = decode(record.body)
    if owner not in (stored.declarers or ()):
        return None
    stored.declarers = tuple(o for o in stored.declarers or () if o != owner)
    return Change(record.name, record.version, record.due, encode(stored))


def fired(record: Schedule, now: float, lives: Lives = lambda _: True) -> Change:
    """The change that puts the jobs of a due schedule and sets its next time.

    A schedule in code without a living declarer puts no jobs. Its due time moves ``FORGET`` seconds
    ahead. If the schedule has no living declarer at that time either, it is removed.
    """
    stored = decode(record.body)
    if stored.declarers is not None and not lives(stored.declarers):
        if stored.undeclared:
            return Change(record.name, record.version, gone=True)
        stored.undeclared = now
        return _to(record.name, record.version, stored)
    stored.undeclared = 0.0
    if stored.catch_up:
        _leave_out_oldest(stored, now)
    jobs: list[Envelope] = []
    uncounted: Stored | None = None
    while stored.planned and stored.planned <= now and len(jobs) < AT_ONCE:
        jobs.append(job_of(stored, stored.planned, now))
        stored.last = stored.planned
        single = bool(stored.repeats or stored.job.key)
        if single:  # a job that the store leaves out is no repeat, and is not the last job
            uncounted = copy.copy(stored)
            uncounted.planned = _next(uncounted, now)
        stored.last_job = jobs[-1].id
        stored.fired += 1
        stored.planned = _next(stored, now)
        if stored.jitter or single:  # each job has its own jitter, and may be the last
            break
    change = _to(record.name, record.version, stored, tuple(jobs))
    if uncounted is None or uncounted.ended:
        return change
    return msgspec.structs.replace(change, instead=(due_of(uncounted), encode(uncounted)))


def next_times(stored: Stored, now: float, most: int) -> list[float]:
    """The next times that get a job, if the schedule is due to fire now."""
    found: list[float] = []
    if stored.paused or stored.undeclared:
        return found
    stored = copy.copy(stored)
    if stored.catch_up:
        _leave_out_oldest(stored, now)
    while stored.planned and len(found) < most:
        found.append(stored.planned)
        stored.fired += 1
        stored.planned = _next(stored, now)
    return found


def paused(record: Schedule) -> Change:
    stored = decode(record.body)
    stored.paused = True
    return _to(record.name, record.version, stored)


def resumed(record: Schedule, now: float) -> Change:
    stored = decode(record.body)
    if stored.paused and not stored.ended:
        _resume(stored, now)
    stored.paused = False
    return _to(record.name, record.version, stored)


def restored(record: Schedule, now: float) -> Change | None:
    """The change for a clock that was set back; None when the next time fits the clock."""
    stored = decode(record.body)
    idle = stored.ended or stored.paused or stored.undeclared
    if idle or not _is_set_back(stored, now):
        return None
    _resume(stored, now)
    return _to(record.name, record.version, stored)


def retimed(record: Schedule, rule: Rule, said: float, now: float) -> Change:
    """The change that gives a schedule another rule, from now on; its counters stay."""
    stored = decode(record.body)
    stored.rule, stored.unanchored, stored.said = rule, False, said
    _begin(stored, now)
    return _to(record.name, record.version, stored)


def job_of(stored: Stored, planned: float, now: float) -> Envelope:
    job = copy.copy(stored.job)
    job.id = new_id()
    job.created = now
    assert job.planned is not None
    job.planned = Planned(job.planned.schedule, planned)
    return job


def due_of(stored: Stored) -> float:
    """The due time of a record: its planned time plus jitter; 0 for never."""
    if stored.paused or stored.ended:
        return 0.0
    if stored.undeclared:
        return stored.undeclared + FORGET
    return stored.planned + (random.uniform(0, stored.jitter) if stored.jitter else 0.0)


def _begin(stored: Stored, now: float) -> None:
    """Begin at the first time from now on. Earlier times do not count as missed."""
    if stored.rule.counts_from_start and not stored.rule.start:
        stored.rule, stored.unanchored = msgspec.structs.replace(stored.rule, start=now), True
    stored.planned = _finite(next_time(stored.rule, now))


def _resume(stored: Stored, now: float) -> None:
    if stored.unanchored and stored.rule.start > now:
        stored.rule = msgspec.structs.replace(stored.rule, start=now)
    stored.planned = _finite(next_time(stored.rule, _over(stored, now)))


def _over(stored: Stored, now: float) -> float:
    """The moment up to which all times are over."""
    # Cron and calendar times that have fired stay over when the clock is set back. But if the last
    # one is more than a day ahead, the clock was wrong when it fired: then the schedule fires
    # again.
    has_fired = now < stored.last <= now + DAY and not stored.rule.every
    return stored.last if has_fired else now


def _is_set_back(stored: Stored, now: float) -> bool:
    """True when the next time is later than the rule says: the clock was set back."""
    # Without this check the schedule would not fire until its old next time. A difference of up to
    # ``SKEW`` is normal between machines that share a store.
    rule = stored.rule
    if rule.every:
        begun = stored.unanchored or rule.start <= now
        return begun and stored.planned - now > rule.every + SKEW
    return not rule.at and stored.planned > next_time(rule, _over(stored, now)) + SKEW


def _leave_out_oldest(stored: Stored, now: float) -> None:
    """If more than ``MOST_MISSED`` times were missed, leave out the oldest of them."""
    # Times may lie close together for an hour, and then a day apart. So the missed times are
    # counted.
    following = [stored.planned, *times(stored.rule, stored.planned, 3)]
    gap = min((b - a for a, b in itertools.pairwise(following)), default=math.inf)
    span = (MOST_MISSED + 1) * gap
    while span < now - stored.planned:
        if _has_many(stored.rule, now - span, now):
            stored.planned = next_time(stored.rule, now - span)
            return
        span *= 2


def _has_many(rule: Rule, after: float, until: float) -> bool:
    """True when a rule has ``MOST_MISSED`` times, or more, between two moments."""
    for _ in range(MOST_MISSED):
        after = next_time(rule, after)
        if after > until:
            return False
    return True


def _next(stored: Stored, now: float) -> float:
    if stored.repeats and stored.fired >= stored.repeats:
        return 0.0
    following = next_time(stored.rule, stored.planned)
    if following + stored.jitter <= now and not stored.catch_up:
        # The current job stands for all missed times.
        following = next_time(stored.rule, now)
    return _finite(following)


def _finite(when: float) -> float:
    return when if when < math.inf else 0.0


def _is_same(new: Stored, was: Stored, now: float) -> bool:
    """True when two rules have the same times, so that the old counters apply to the new rule."""
    # Code such as ``start=datetime.now()`` gives another moment each time it is loaded. Two moments
    # count as the same when they differ by the time between the two declarations. Two starts also
    # count as the same when both are past and the times from now on are equal.
    for field in ("repeats", "jitter", "catch_up"):
        if getattr(new, field) != getattr(was, field):
            return False
    ours, theirs = _as_given(new), _as_given(was)
    if ours == theirs:
        return True
    if _timeless(ours) != _timeless(theirs):
        return False
    if all(bool(a) == bool(b) for a, b in zip(_moments(ours), _moments(theirs), strict=True)):
        passed = new.said - was.said if was.said else math.inf
        moved = [a - b for a, b in zip(_moments(ours), _moments(theirs), strict=True) if a != b]
        if all(abs(seconds - passed) < ABOUT for seconds in moved):
            return True
    started = 0 < ours.start <= now and 0 < theirs.start <= now
    return started and _from(ours, now) == _from(theirs, now)


def _as_given(stored: Stored) -> Rule:
    return msgspec.structs.replace(stored.rule, start=0.0) if stored.unanchored else stored.rule


def _unsigned(job: Envelope) -> Envelope:
    return msgspec.structs.replace(job, signature=b"")


def _timeless(rule: Rule) -> Rule:
    return msgspec.structs.replace(rule, at=0.0, start=0.0, end=0.0)


def _moments(rule: Rule) -> tuple[float, float, float]:
    return rule.at, rule.start, rule.end


def _from(rule: Rule, now: float) -> list[float]:
    """Some times of a rule from now on, to the millisecond, and the end of the rule."""
    return [*(round(when, 3) for when in times(rule, now, 13)), rule.end]


def _to(name: str, version: int, stored: Stored, jobs: tuple[Envelope, ...] = ()) -> Change:
    over = stored.ended and not stored.code  # a schedule in code stays: a worker would add it again
    return Change(name, version, due_of(stored), encode(stored), gone=over, jobs=jobs)
