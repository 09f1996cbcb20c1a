"""What a schedule's record says, and how it goes on: declared, fired, paused, ended.

Everything here is a function of the record and the time it is given, so that whoever is handed a
due schedule comes to the same change, and the broker lets one of them make it.

    due ──(fired)──► due ──► … ──► ended: no time is left, or no repeat
     ▲ │
     │ └──(paused)──► paused
     └───(resumed)──────┘
"""

from __future__ import annotations

import copy
import math
import random

import msgspec

from tidemill.brokers.schedules import Change, Schedule
from tidemill.clock import new_id
from tidemill.errors import CodecError
from tidemill.job import Envelope, Planned
from tidemill.schedules.rules import Rule, next_time

__all__ = [
    "Stored",
    "added",
    "declared",
    "decode",
    "due_of",
    "encode",
    "fired",
    "job_of",
    "paused",
    "resumed",
]

AT_ONCE = 100
"""Missed times that one step makes up for."""


class Stored(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The body of a schedule's record. Times are wall time, 0 for none.

    Attributes:
        rule: when it fires. Without a ``start`` of its own (``unanchored``) an interval or a
            calendar step counts from when it was first stored.
        job: what it puts, but for id and time.
        repeats: jobs after which it ends; 0 for no limit.
        jitter: seconds by which a job is late at most.
        catch_up: whether each missed time is made up for.
        planned: the time it fires for next; without jitter, the record's own due time.
        fired: jobs it has put, or tried to.
        last: the time the latest of them was for.
        paused: it does not fire until it is resumed.
        app: the app that declares it in its code, as the worker was given it.
        code: it is declared in code.
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


def declared(name: str, new: Stored, old: Schedule | None, now: float) -> Change | None:
    """The change that makes a record what the code says; None when it is that already.

    While the rule is the same, the next time and all that was counted stay; what was paused stays
    so in any case.
    """
    if old is None:
        return added(name, new, now)
    was = decode(old.body)
    new.app = new.app or was.app
    new.paused = was.paused
    if _terms(new) != _terms(was):
        _begin(new, now)
        return _to(name, old.version, new)
    new.rule, new.unanchored = was.rule, was.unanchored
    new.planned, new.fired, new.last = was.planned, was.fired, was.last
    body = encode(new)
    return Change(name, old.version, old.due, body) if body != old.body else None


def fired(record: Schedule, now: float) -> Change:
    """The change that puts the jobs of a due schedule and sets its next time."""
    stored = decode(record.body)
    jobs: list[Envelope] = []
    while stored.planned and stored.planned <= now and len(jobs) < AT_ONCE:
        jobs.append(job_of(stored, stored.planned, now))
        stored.fired += 1
        stored.last = stored.planned
        stored.planned = _next(stored, now)
        if stored.jitter:  # the next one is late by itself
            break
    return _to(record.name, record.version, stored, tuple(jobs))


def paused(record: Schedule) -> Change:
    """The change that stops it until it is resumed."""
    stored = decode(record.body)
    stored.paused = True
    return _to(record.name, record.version, stored)


def resumed(record: Schedule, now: float) -> Change:
    """The change that lets it go on, with its first time from now on."""
    stored = decode(record.body)
    if stored.paused and not stored.ended:
        stored.planned = _finite(next_time(stored.rule, now))
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
    return stored.planned + (random.uniform(0, stored.jitter) if stored.jitter else 0.0)


def _begin(stored: Stored, now: float) -> None:
    """From the first time on. Times before it was stored were not missed."""
    if stored.rule.counts_from_start and not stored.rule.start:
        stored.rule, stored.unanchored = msgspec.structs.replace(stored.rule, start=now), True
    stored.planned = _finite(next_time(stored.rule, now))


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


def _terms(stored: Stored) -> tuple[object, ...]:
    """What decides about its times."""
    rule = stored.rule
    if stored.unanchored:
        rule = msgspec.structs.replace(rule, start=0.0)
    return rule, stored.repeats, stored.jitter, stored.catch_up


def _to(name: str, version: int, stored: Stored, jobs: tuple[Envelope, ...] = ()) -> Change:
    over = stored.ended and not stored.code  # code would declare it again
    return Change(name, version, due_of(stored), encode(stored), gone=over, jobs=jobs)
