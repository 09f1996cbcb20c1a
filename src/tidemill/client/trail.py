"""The trail of a job: the events in its record, in order."""

from __future__ import annotations

import re

import msgspec

from tidemill.core.envelope import priority_of
from tidemill.core.job import Attempt, Outcome, Record, State
from tidemill.core.words import counted


class Event(msgspec.Struct, frozen=True):
    """One event in the life of a job.

    Attributes:
        time: epoch seconds.
        what: the kind of event, such as ``created``, ``leased``, ``started`` or ``failed``.
        detail: a text such as the worker, or the error.
        traceback: the traceback of a failed attempt; empty for most events.
    """

    time: float
    what: str
    detail: str = ""
    traceback: str = ""


_OUTCOMES = {
    Outcome.SUCCESS: "succeeded",
    Outcome.RETRY: "failed, to be retried",
    Outcome.FAIL: "failed",
    Outcome.CANCELLED: "cancelled",
    Outcome.EXPIRED: "expired",
    Outcome.RELEASE: "interrupted",
}

_INTERRUPTED = re.compile(
    r"(interrupted|lost) after (\d+\.\d{3}) s(?:: (.*)| with its worker (.*))", re.DOTALL
)
"""The line that a worker logs for an interrupted run, or a store for a lost lease."""


def with_interrupted_runs(record: Record) -> Record:
    """The record with each interrupted run as an attempt, instead of as a line of the log.

    An interrupted run counts no attempt: its number is 0, and its outcome is ``RELEASE``. A run
    that was lost with its worker has no start, since nobody knows whether the task began.
    """
    log, runs = [], [*record.attempts]
    for when, line in record.log:
        match = _INTERRUPTED.fullmatch(line)
        began = when - float(match[2]) if match else 0.0
        if match is None or began < record.envelope.created - 1:  # the task's own line
            log.append((when, line))
            continue
        what, _, why, worker = match.groups()
        later = [each.run for each in record.attempts if each.ended > when]
        leased, started = (began, 0.0) if what == "lost" else (0.0, began)
        error = why or "lost with its worker; nobody knows whether the task began"
        run = min([record.run, *later])
        runs.append(
            Attempt(0, worker or "", leased, started, when, Outcome.RELEASE, error, run=run)
        )
    if len(runs) == len(record.attempts):
        return record
    runs.sort(key=lambda run: run.ended or run.leased)
    return msgspec.structs.replace(record, log=log, attempts=runs)


def attempt_text(record: Record, run: int, number: int) -> str:
    """An attempt in words: ``attempt 1 of 4``, or ``run 2, attempt 1 of 4`` after a retry by hand.

    ``number`` is 0 for an interrupted run.
    """
    if not number:
        return f"{f'run {run}, ' if run > 1 else ''}counts no attempt"
    most = f" of {record.max_attempts}" if record.max_attempts else ""
    return f"{f'run {run}, ' if run > 1 else ''}attempt {number}{most}"


def trail_of(record: Record) -> list[Event]:
    """The events of a job, oldest first; the last event says where the job is now."""
    record = with_interrupted_runs(record)
    envelope = record.envelope
    kind = f"task {envelope.task}" if envelope.task else "message"
    detail = f"{kind} in queue {envelope.queue}, priority {priority_of(record.rank):g}"
    events = [Event(envelope.created, "created", detail)]
    for attempt in record.attempts:
        events += _attempt_events(record, attempt)
    events += [Event(when, "log", line) for when, line in record.log]
    events.sort(key=lambda event: event.time)  # stable: equal times keep their order
    return events + _current_events(record)


def _attempt_events(record: Record, attempt: Attempt) -> list[Event]:
    events = []
    if attempt.leased:
        events.append(Event(attempt.leased, "leased", f"by {attempt.worker}"))
    if attempt.started:
        text = attempt_text(record, attempt.run, attempt.number)
        events.append(Event(attempt.started, "started", text))
    took = f"after {attempt.ended - attempt.started:.3f} s" if attempt.started else ""
    detail = ": ".join(part for part in (took, attempt.error) if part)
    ended = attempt.ended or attempt.leased
    events.append(Event(ended, _ended(record, attempt), detail, attempt.traceback))
    return events


def _current_events(record: Record) -> list[Event]:
    """The event that describes the job's present state, if the attempts do not describe it."""
    if is_stuck(record):
        return [Event(record.attempts[-1].ended, "stuck", "until its old run is dead")]
    if record.state is State.RUNNING:
        return [Event(record.leased, "leased", f"by {record.worker}")]
    if record.state is State.SCHEDULED:
        return [Event(record.due, "due", "ready again then" if record.attempt else "ready then")]
    if record.state is State.WAITING and record.pending:
        jobs = counted(record.pending, "job")
        return [Event(record.envelope.created, "waiting", f"for {jobs} before it")]
    if record.finished and record.state is not State.SUCCEEDED and not _attempt_ended_it(record):
        return [Event(record.finished, str(record.state), record.error)]
    return []


def _ended(record: Record, attempt: Attempt) -> str:
    """How an attempt ended. The last attempt of a run fails, even if its verdict was a retry."""
    outcome = record.outcome_of(attempt)
    if attempt.outcome == Outcome.RETRY and outcome is Outcome.FAIL:
        return "failed, no attempts are left"
    return _OUTCOMES[outcome]


def is_stuck(record: Record) -> bool:
    """True when the running attempt is already counted, and its process is not killed yet."""
    running = record.state is State.RUNNING and bool(record.attempts)
    return running and record.attempts[-1].leased == record.leased


def _attempt_ended_it(record: Record) -> bool:
    """True when the error of the last attempt is the error of the job."""
    return bool(record.attempts) and record.error == record.attempts[-1].error
