"""The record of a schedule, and its changes: declared, fired, paused, ended.

Each function depends only on the record and the given time. So all workers with the same due
schedule compute the same change, and the broker accepts the change of one.

    due ──(fired)──► due ──► … ──► ended: no time is left, or no repeat
     ▲ │
     │ ├──(paused)──► paused ──────(resumed)──┐
     │ └──(no living declarer)──► undeclared ──(30 days)──► deleted
     └───────────────────────────────────(declared)──┘

The record of a schedule in code lists the owners that declared it: workers. It fires while one of
them lives, whichever worker fires it. The name of an app does not decide, and no worker removes the
schedule of another. So neither two apps of one name nor two versions of one app remove each
other's schedules.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Collection
from typing import Protocol

import msgspec

from tidemill.brokers.contract.schedules import Change, Schedule
from tidemill.core.clock import new_id
from tidemill.core.errors import CodecError
from tidemill.core.job import Envelope, Planned
from tidemill.schedules.rules import Rule, next_time, times

__all__ = [
    "Stored",
    "added",
    "declared",
    "decode",
    "differs",
    "due_of",
    "encode",
    "fired",
    "is_the_same",
    "job_of",
    "paused",
    "resumed",
    "withdrawn",
]

AT_ONCE = 100
"""Missed times that one step makes up for."""

FORGET = 30 * 86_400.0
"""Seconds after which a schedule is removed that no living worker declares."""

SKEW = 60.0
"""Seconds by which the clocks of machines that share a store may differ."""

ABOUT = 10.0
"""Seconds by which two declarations of ``datetime.now()`` plus something may be inexact."""


class Lives(Protocol):
    """True when any of these owners is alive."""

    def __call__(self, owners: Collection[str], /) -> bool: ...


class Stored(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The body of a schedule's record. Times are wall time, 0 for none.

    Attributes:
        rule: the rule of its times. Without a ``start`` of its own (``unanchored``) an interval or
            a calendar step counts from the first storing.
        job: its job, but for id and time.
        repeats: jobs after which it ends, not counting those left out; 0 for no limit.
        jitter: the most seconds by which a job is late.
        catch_up: True to put a job for each missed time.
        planned: the next time; without jitter, the record's own due time.
        fired: jobs it has put; unless there are ``repeats``, including those left out.
        last: the time of the latest job.
        paused: True while it does not fire until it is resumed.
        app: the app whose code declares it, as the worker was given it; only for display.
        code: True when code declares it.
        declarers: the workers that declared it; to fire it, one must live. None when it was
            declared
            without a worker: then it fires in any case.
        undeclared: the time since which no declarer lives, and it does not fire.
        said: the time at which the moments of its rule were given, if it has any.
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
    paused: bool = False
    app: str = ""
    code: bool = False
    declarers: tuple[str, ...] | None = None
    undeclared: float = 0.0
    said: float = 0.0

    @property
    def ended(self) -> bool:
        """True when it will fire no more."""
        return not self.planned


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Stored).decode


def decode(body: bytes) -> Stored:
    """Decode the body of a record.

    Raises:
        CodecError: another version of tidemill wrote it.
    """
    try:
        return _decode(body)
    except msgspec.MsgspecError as error:
        raise CodecError(f"it was stored by another version of tidemill: {error}") from error


def added(name: str, new: Stored, now: float) -> Change:
    """The change that makes a new record. It is ended if it has no time left."""
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
    """The change that makes a record equal to the code; None when it is already.

    With the same rule, the next time and all counters stay; a paused schedule stays paused. A
    worker (``owner``) joins the declarers that are ``alive``. For a worker there is always a
    change, even if
    only of the version: another worker that found no living declarer, and is about to say so, is
    then too late.
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
    new.planned, new.fired, new.last = was.planned, was.fired, was.last
    if was.planned and _is_set_back(new, now):
        _resume(new, now)
        return _to(name, old.version, new)
    body = encode(new)
    if body == old.body and not owner:
        return None
    return Change(name, old.version, due_of(new) if was.undeclared else old.due, body)


def differs(new: Stored, old: Schedule) -> bool:
    """True when a declaration changes more than the declarers."""
    was = decode(old.body)
    was.declarers, was.undeclared = new.declarers, new.undeclared
    return encode(was) != encode(new)


def is_the_same(new: Stored, old: Schedule) -> bool:
    """True when the schedule to add exists: the same job at the same times, not from code."""
    was = decode(old.body)
    if was.code:
        return False
    one, other = (
        (stored.repeats, stored.jitter, stored.catch_up, _as_given(stored), _unsigned(stored.job))
        for stored in (new, was)
    )
    return one == other


def withdrawn(record: Schedule, owner: str) -> Change | None:
    """The change by which a worker stops declaring a schedule; None when it did not declare it."""
    stored = decode(record.body)
    if owner not in (stored.declarers or ()):
        return None
    stored.declarers = tuple(o for o in stored.declarers or () if o != owner)
    return Change(record.name, record.version, record.due, encode(stored))


def _always(owners: Collection[str]) -> bool:
    return True


def fired(record: Schedule, now: float, lives: Lives = _always) -> Change:
    """The change that puts the jobs of a due schedule and sets its next time.

    A schedule in code without a living declarer puts no jobs: it is set aside, and removed when it
    comes up again, a long time later.
    """
    stored = decode(record.body)
    if stored.declarers is not None and not lives(stored.declarers):
        if stored.undeclared:
            return Change(record.name, record.version, gone=True)
        stored.undeclared = now
        return _to(record.name, record.version, stored)
    stored.undeclared = 0.0
    jobs: list[Envelope] = []
    uncounted: Stored | None = None
    while stored.planned and stored.planned <= now and len(jobs) < AT_ONCE:
        jobs.append(job_of(stored, stored.planned, now))
        stored.last = stored.planned
        if stored.repeats:  # a job that is left out is none of them
            uncounted = copy.copy(stored)
            uncounted.planned = _next(uncounted, now)
        stored.fired += 1
        stored.planned = _next(stored, now)
        if stored.jitter or stored.repeats:  # the next one is late by itself, or may be the last
            break
    change = _to(record.name, record.version, stored, tuple(jobs))
    if uncounted is None or uncounted.ended:
        return change
    return msgspec.structs.replace(change, instead=(due_of(uncounted), encode(uncounted)))


def paused(record: Schedule) -> Change:
    """The change that stops a schedule until it is resumed."""
    stored = decode(record.body)
    stored.paused = True
    return _to(record.name, record.version, stored)


def resumed(record: Schedule, now: float) -> Change:
    """The change that lets a schedule go on, with its first time from now on."""
    stored = decode(record.body)
    if stored.paused and not stored.ended:
        _resume(stored, now)
    stored.paused = False
    return _to(record.name, record.version, stored)


def job_of(stored: Stored, planned: float, now: float) -> Envelope:
    """The job of a schedule for one of its times."""
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
    """Begin at the first time. Times before it was stored were not missed."""
    if stored.rule.counts_from_start and not stored.rule.start:
        stored.rule, stored.unanchored = msgspec.structs.replace(stored.rule, start=now), True
    stored.planned = _finite(next_time(stored.rule, now))


def _resume(stored: Stored, now: float) -> None:
    """Go on from now. A rule that counts from its storing begins anew if the clock went back."""
    if stored.unanchored and stored.rule.start > now:
        stored.rule = msgspec.structs.replace(stored.rule, start=now)
    stored.planned = _finite(next_time(stored.rule, now))


def _is_set_back(stored: Stored, now: float) -> bool:
    """True when an interval's next time is farther away than the interval: the clock went back.

    The schedule would be silent for as long. Clocks of machines that share a store may differ by
    ``SKEW``.
    """
    rule = stored.rule
    begun = stored.unanchored or rule.start <= now
    return bool(rule.every) and begun and stored.planned - now > rule.every + SKEW


def _next(stored: Stored, now: float) -> float:
    if stored.repeats and stored.fired >= stored.repeats:
        return 0.0
    following = next_time(stored.rule, stored.planned)
    if following + stored.jitter <= now and not stored.catch_up:
        # This job stands for those that were missed.
        following = next_time(stored.rule, now)
    return _finite(following)


def _finite(when: float) -> float:
    return when if when < math.inf else 0.0


def _is_same(new: Stored, was: Stored, now: float) -> bool:
    """True when two rules have the same times, so that the counters of one apply to the other.

    Code may give other moments each time it is loaded, as ``start=datetime.now()``. Moments are the
    same when they moved by as much as the time at which they were given. A start is the same, too,
    when both are past and the times from now on are equal.
    """
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
    """Some of its times from now on, to the millisecond, and its end."""
    return [*(round(when, 3) for when in times(rule, now, 13)), rule.end]


def _to(name: str, version: int, stored: Stored, jobs: tuple[Envelope, ...] = ()) -> Change:
    over = stored.ended and not stored.code  # code would declare it again
    return Change(name, version, due_of(stored), encode(stored), gone=over, jobs=jobs)
