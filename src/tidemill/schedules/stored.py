"""What a schedule's record says, and how it goes on: declared, fired, paused, ended.

Everything here is a function of the record and the time it is given, so that whoever is handed a
due schedule comes to the same change, and the broker lets one of them make it.

    due ──(fired)──► due ──► … ──► ended: no time is left, or no repeat
     ▲ │
     │ ├──(paused)──► paused ──────(resumed)──┐
     │ └──(nobody who declares it lives)──► undeclared ──(30 days)──► gone
     └───────────────────────────────────(declared)──┘

What code declares has the owners written in it that did so: workers. It fires while one of them
lives, whoever is handed it. No name of an app says whose it is, and no worker removes what another
declares: neither two apps of one name, nor two versions of one app, can take each other's away.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Collection
from typing import Protocol

import msgspec

from tidemill.brokers.schedules import Change, Schedule
from tidemill.clock import new_id
from tidemill.errors import CodecError
from tidemill.job import Envelope, Planned
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
    """Whether any of these owners is alive."""

    def __call__(self, owners: Collection[str], /) -> bool: ...


class Stored(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The body of a schedule's record. Times are wall time, 0 for none.

    Attributes:
        rule: when it fires. Without a ``start`` of its own (``unanchored``) an interval or a
            calendar step counts from when it was first stored.
        job: what it puts, but for id and time.
        repeats: jobs after which it ends, without those that were left out; 0 for no limit.
        jitter: seconds by which a job is late at most.
        catch_up: whether each missed time is made up for.
        planned: the time it fires for next; without jitter, the record's own due time.
        fired: jobs it has put; unless there are ``repeats``, with those that were left out.
        last: the time the latest of them was for.
        paused: it does not fire until it is resumed.
        app: the app that declares it in its code, as the worker was given it; only to be shown.
        code: it is declared in code.
        declarers: the owners that declared it, workers; whoever fires it sees that one lives. None
            when it was declared without a worker: it fires in any case.
        undeclared: since when none of them lives, and it does not fire.
        said: when the moments of its rule were said, if it has any.
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
    """What the bytes say.

    Raises:
        CodecError: they are of another version of tidemill.
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
    """The change that makes a record what the code says; None when it is that already.

    While the rule is the same, the next time and all that was counted stay; what was paused stays
    so in any case. A worker (``owner``) becomes one of the declarers, beside those that are
    ``alive``. For it there is always a change, and be it but another version: whoever has found
    that no declarer lives, and is about to say so, was too early.
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
    """Whether what was declared changes more than who declares it."""
    was = decode(old.body)
    was.declarers, was.undeclared = new.declarers, new.undeclared
    return encode(was) != encode(new)


def is_the_same(new: Stored, old: Schedule) -> bool:
    """Whether what is to be added is there: the same job at the same times, and not by code."""
    was = decode(old.body)
    if was.code:
        return False
    one, other = (
        (stored.repeats, stored.jitter, stored.catch_up, _as_given(stored), _unsigned(stored.job))
        for stored in (new, was)
    )
    return one == other


def withdrawn(record: Schedule, owner: str) -> Change | None:
    """The change by which a worker declares it no more; None when it did not."""
    stored = decode(record.body)
    if owner not in (stored.declarers or ()):
        return None
    stored.declarers = tuple(o for o in stored.declarers or () if o != owner)
    return Change(record.name, record.version, record.due, encode(stored))


def _always(owners: Collection[str]) -> bool:
    return True


def fired(record: Schedule, now: float, lives: Lives = _always) -> Change:
    """The change that puts the jobs of a due schedule and sets its next time.

    When it is declared in code, and by no living worker, there are no jobs: it is put aside, and
    when it comes again, a long time later, it is removed.
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
    """The change that stops it until it is resumed."""
    stored = decode(record.body)
    stored.paused = True
    return _to(record.name, record.version, stored)


def resumed(record: Schedule, now: float) -> Change:
    """The change that lets it go on, with its first time from now on."""
    stored = decode(record.body)
    if stored.paused and not stored.ended:
        _resume(stored, now)
    stored.paused = False
    return _to(record.name, record.version, stored)


def job_of(stored: Stored, planned: float, now: float) -> Envelope:
    """A job as the schedule puts it, for one of its times."""
    job = copy.copy(stored.job)
    job.id = new_id()
    job.created = now
    assert job.planned is not None
    job.planned = Planned(job.planned.schedule, planned)
    return job


def due_of(stored: Stored) -> float:
    """When a record is to be handed out: its time, and as much later as jitter has it; 0: never."""
    if stored.paused or stored.ended:
        return 0.0
    if stored.undeclared:
        return stored.undeclared + FORGET
    return stored.planned + (random.uniform(0, stored.jitter) if stored.jitter else 0.0)


def _begin(stored: Stored, now: float) -> None:
    """From the first time on. Times before it was stored were not missed."""
    if stored.rule.counts_from_start and not stored.rule.start:
        stored.rule, stored.unanchored = msgspec.structs.replace(stored.rule, start=now), True
    stored.planned = _finite(next_time(stored.rule, now))


def _resume(stored: Stored, now: float) -> None:
    """From now on. What counts from when it was stored does so anew if the clock was set before."""
    if stored.unanchored and stored.rule.start > now:
        stored.rule = msgspec.structs.replace(stored.rule, start=now)
    stored.planned = _finite(next_time(stored.rule, now))


def _is_set_back(stored: Stored, now: float) -> bool:
    """Whether an interval's next time is farther away than that long: the clock was set back.

    It would be silent for as long. Clocks of machines that share a store may differ by ``SKEW``.
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
    """Whether both say the same about its times, so that what the one began the other goes on with.

    Code may say other moments each time it is loaded, as ``start=datetime.now()``. They are the
    same when they have moved by as much as the time has in which they were said; and so is a start
    when both are past and the times from now on are the same.
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
