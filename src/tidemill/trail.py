"""The trail of a job: its record told as events in order; gmq's wish to trace a message by id."""

from __future__ import annotations

import msgspec

from tidemill.brokers.base import Broker
from tidemill.job import Attempt, Outcome, Owner, Record, State, priority_of

__all__ = ["Event", "explain", "explain_in", "serving", "trail_of"]


class Event(msgspec.Struct, frozen=True):
    """One thing that happened. ``time`` is wall time; ``traceback`` only where there is one."""

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
}


def trail_of(record: Record) -> list[Event]:
    """Every event the record tells of, oldest first."""
    envelope = record.envelope
    what = f"task {envelope.task}" if envelope.task else "message"
    detail = f"{what} in queue {envelope.queue}, priority {priority_of(record.rank):g}"
    events = [Event(envelope.created, "created", detail)]
    for attempt in record.attempts:
        if attempt.leased:
            events.append(Event(attempt.leased, "leased", f"by {attempt.worker}"))
        if attempt.started:
            events.append(Event(attempt.started, "started", f"attempt {attempt.number}"))
        took = f"after {attempt.ended - attempt.started:.3f} s" if attempt.started else ""
        events.append(
            Event(
                attempt.ended or attempt.leased,
                _ended(record, attempt),
                ": ".join(part for part in (took, attempt.error) if part),
                attempt.traceback,
            )
        )
    events += [Event(when, "log", line) for when, line in record.log]
    events.sort(key=lambda event: event.time)  # stable: what has no time of its own keeps its place
    if record.state is State.RUNNING:
        events.append(Event(record.leased, "leased", f"by {record.worker}"))
    elif record.state is State.SCHEDULED:
        then = "ready again then" if record.attempt else "ready then"
        events.append(Event(record.due, "due", then))
    elif record.finished and record.state is not State.SUCCEEDED and not _told(record):
        events.append(Event(record.finished, str(record.state), record.error))
    return events


def _ended(record: Record, attempt: Attempt) -> str:
    """How an attempt ended; the last of a failed job was to be retried and could not."""
    outcome = Outcome(attempt.outcome)
    if outcome is Outcome.RETRY and record.state is State.FAILED and attempt is record.attempts[-1]:
        return "failed, no attempts are left"
    return _OUTCOMES[outcome]


def _told(record: Record) -> bool:
    """True when the last attempt says already how the job ended."""
    return bool(record.attempts) and record.error == record.attempts[-1].error


def explain(record: Record, *, paused: bool, workers: int) -> str:
    """In one sentence, why the job is where it is."""
    queue = record.envelope.queue
    if record.state is State.READY:
        if paused:
            return f"It is ready, but queue {queue!r} is paused: tidemill resume {queue}"
        if not workers:
            return f"It is ready, but no worker serves queue {queue!r}: start one"
        return f"It is ready and waits for a free slot among {workers} worker(s) of queue {queue!r}"
    if record.state is State.SCHEDULED:
        why = ", as it was put with a delay"
        if record.error:
            why = f": {record.error}"
        elif record.attempts:
            why = f": attempt {record.attempt} failed ({record.attempts[-1].error})"
        return f"It waits for its time{why}"
    if record.state is State.WAITING:
        return f"It waits for the running job with the same key {record.envelope.key!r}"
    if record.state is State.RUNNING:
        asked = ", and was asked to cancel" if record.cancelling else ""
        return f"It was leased by {record.worker}{asked}"
    return f"It {record.state}" + (f": {record.error}" if record.error else "")


def serving(broker: Broker, queue: str) -> list[Owner]:
    """The workers alive that take jobs of a queue."""
    return [
        owner
        for owner in broker.owners()
        if owner.kind == "worker" and (not owner.queues or queue in owner.queues)
    ]


def explain_in(broker: Broker, record: Record) -> str:
    """As ``explain``, with what the broker itself knows of the queue and its workers."""
    queue = record.envelope.queue
    paused = any(row.paused for row in broker.stats() if row.name == queue)
    return explain(record, paused=paused, workers=len(serving(broker, queue)))
