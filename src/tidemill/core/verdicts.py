"""The rules of a verdict: whether it counts an attempt, and the state that it gives a job.

The rules are the same on every broker. So is the rule for a job whose task its owner does not know:
the owner gives the job back, and the job is tried again later. The next try comes after 1 s, later
after about a quarter of the time since the job was first due, at most after 30 s. Jobs of one batch
get different delays, so their next tries meet different workers. So several apps may share a queue:
sooner or later, a worker that knows the task gets the job.
"""

from __future__ import annotations

import random

from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope
from tidemill.core.job import WHILE_RUNNING, Outcome, Record, State, Verdict

TOO_LATE = "not started before it expired"

COUNTED = frozenset(Outcome) - {Outcome.RELEASE, Outcome.SNOOZE}  # these count an attempt
MAY_NOT_HAVE_RUN = frozenset({Outcome.RELEASE, Outcome.SNOOZE})
"""The outcomes that refund the tokens of limits, if the job has not run under its lease."""

_UNKNOWN = "no worker knows task "
_LEAST, _MOST = 1.0, 30.0  # seconds until the next try of a job of an unknown task
_SPREAD = 0.6  # the smallest part of a delay in use: a whole batch must not be due at one time
_ENDS = {
    Outcome.SUCCESS: State.SUCCEEDED,
    Outcome.FAIL: State.FAILED,
    Outcome.CANCELLED: State.CANCELLED,
    Outcome.EXPIRED: State.EXPIRED,
}


def outcome_of(verdict: Verdict, attempt: int, max_attempts: int) -> Outcome:
    """The outcome of a verdict on an attempt: a retry of the last attempt is a failure.

    ``max_attempts`` is 0 for no limit.
    """
    is_last = bool(max_attempts) and attempt >= max_attempts
    is_failure = verdict.outcome == Outcome.RETRY and is_last
    return Outcome.FAIL if is_failure else Outcome(verdict.outcome)


def end_of(
    verdict: Verdict, outcome: Outcome, *, cancelling: bool, expired: bool
) -> tuple[State, str] | None:
    """The final state of a job and its error; None when the job goes on.

    ``cancelling`` or ``expired`` ends a job that would go on; ``cancelling`` takes precedence.
    """
    if outcome in _ENDS:
        return _ENDS[outcome], "" if outcome is Outcome.SUCCESS else verdict.error
    if cancelling:
        told = verdict.error if outcome is Outcome.RELEASE else ""
        return State.CANCELLED, told or WHILE_RUNNING
    return (State.EXPIRED, TOO_LATE) if expired else None


def given_back(token: int, envelope: Envelope) -> Verdict:
    """The verdict on a leased job whose task its owner does not know."""
    schedule = f" of schedule {envelope.planned.schedule!r}" if envelope.planned else ""
    age = clock.wall() - max(envelope.created + envelope.delay, envelope.at)
    delay = max(_LEAST, min(_MOST, age / 4) * random.uniform(_SPREAD, 1.0))
    error = f"{_UNKNOWN}{envelope.task!r}{schedule}"
    return Verdict(token, Outcome.SNOOZE, delay=delay, error=error)


def is_given_back(verdict: Verdict) -> bool:
    is_snooze = verdict.outcome == Outcome.SNOOZE and not verdict.started
    return is_snooze and verdict.error.startswith(_UNKNOWN)


def waits_for_its_task(record: Record) -> bool:
    """True when a job waits for its next try, as its latest owner did not know its task."""
    return record.state is State.SCHEDULED and record.error.startswith(_UNKNOWN)
