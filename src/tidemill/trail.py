"""The trail of a job: its record told as events in order; gmq's wish to trace a message by id."""

from __future__ import annotations

import msgspec

from tidemill.brokers.base import Broker, Feature, QueueStats
from tidemill.brokers.limiting import limiting
from tidemill.brokers.links import was_dropped
from tidemill.clock import wall_time
from tidemill.gate import Held
from tidemill.job import Attempt, Outcome, Owner, Record, State, Waits, priority_of
from tidemill.limits import terms_text

__all__ = ["Event", "attempt_text", "explain", "explain_in", "serving", "trail_of", "why_not_run"]


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


def attempt_text(record: Record, run: int, number: int) -> str:
    """An attempt in words: ``attempt 1 of 4``, or ``run 2, attempt 1 of 4`` after a kick."""
    most = f" of {record.max_attempts}" if record.max_attempts else ""
    return f"{f'run {run}, ' if run > 1 else ''}attempt {number}{most}"


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
            events.append(
                Event(attempt.started, "started", attempt_text(record, attempt.run, attempt.number))
            )
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
    if _held(record):
        events.append(Event(record.attempts[-1].ended, "stuck", "until its old run is dead"))
    elif record.state is State.RUNNING:
        events.append(Event(record.leased, "leased", f"by {record.worker}"))
    elif record.state is State.SCHEDULED:
        then = "ready again then" if record.attempt else "ready then"
        events.append(Event(record.due, "due", then))
    elif record.state is State.WAITING and record.pending:
        events.append(Event(envelope.created, "waiting", f"for {record.pending} job(s) before it"))
    elif record.finished and record.state is not State.SUCCEEDED and not _told(record):
        events.append(Event(record.finished, str(record.state), record.error))
    return events


def _ended(record: Record, attempt: Attempt) -> str:
    """How an attempt ended. The last attempt of a run fails, whatever its verdict asked for."""
    if attempt.outcome == Outcome.RETRY:
        most = record.max_attempts
        ended = record.state is State.FAILED and attempt is record.attempts[-1]
        if ended or 0 < most <= attempt.number:
            return "failed, no attempts are left"
    outcome = Outcome(attempt.outcome)
    return _OUTCOMES[outcome]


def _held(record: Record) -> bool:
    """True when the attempt is counted, and its process still to be killed."""
    running = record.state is State.RUNNING and bool(record.attempts)
    return running and record.attempts[-1].leased == record.leased


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
    if record.unknown:
        left = record.due - wall_time()
        end = f"; it fails in {max(0.0, left):.3g} s if none comes" if record.due else ""
        name = record.envelope.task
        return f"It is set aside, as {record.error}: start a worker whose app has {name!r}{end}"
    if record.state is State.SCHEDULED:
        why = ", as it was put with a delay"
        if record.error:
            why = f": {record.error}"
        elif record.attempts and record.attempt:
            told = attempt_text(record, record.run, record.attempt)
            why = f": {told} failed ({record.attempts[-1].error})"
        return f"It waits for its time{why}"
    if record.state is State.WAITING and record.envelope.links is not None:
        return _waits_for(record)
    if record.state is State.WAITING:
        return f"It waits for the running job with the same key {record.envelope.key!r}"
    if record.state is State.RUNNING:
        if _held(record):
            return "Its latest run is stuck, and it is tried again when that has been killed"
        asked = ", and was asked to cancel" if record.cancelling else ""
        told = attempt_text(record, record.run, record.attempt + 1)
        again = f" for {told}" if record.run > 1 else ""
        return f"It was leased by {record.worker}{again}{asked}"
    return f"It {record.state}" + (f": {record.error}" if record.error else "")


def why_not_run(record: Record) -> str:
    """Why a retry of a job was refused, and how to run the job again all the same."""
    e, state = record.envelope, record.state
    if state is State.SUCCEEDED and e.links is not None:
        return "it succeeded already, and jobs after it in its chain, group or flow went on"
    if state is State.SUCCEEDED:
        held = f", and holds its key {e.key!r} for a time" if e.key and e.unique else ""
        return f"it succeeded already{held}; retry with --force (force=True) runs it again"
    if e.key and state.finished:
        return (
            f"it {state}, and another job has its key {e.key!r}: one that is unfinished, or "
            "that succeeded within its unique_for; for the latter retry with --force (force=True)"
        )
    return f"it is {state}"


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
    [row] = [row for row in broker.stats() if row.name == queue] or [QueueStats(name=queue)]
    told = explain(record, paused=row.paused, workers=len(serving(broker, queue)))
    if record.state is State.READY and row.carried:
        told = f"{told}; {_carried(broker, row)}"
    if record.state is State.READY and not row.paused and Feature.LIMITS in broker.features:
        held = limiting(broker, "explain").held(record.envelope.id)
        told = _held_back(held) if held is not None else told
    if record.state is State.WAITING:
        named = [f"{r.envelope.id} ({r.state})" for r in _before(broker, record) if not _ok(r)]
        return f"{told}: {', '.join(named)}" if named else told
    cause = _cause(broker, record) if was_dropped(record) else None
    if cause is None:
        return told
    return f"{told}; it began with job {cause.envelope.id}, which {cause.state}: {cause.error}"


def _carried(broker: Broker, row: QueueStats) -> str:
    """Where a job lies that is ready in a queue of which some are carried."""
    where = broker.url if broker.url.startswith("amqp") else "the carrier"
    if row.carried >= row.ready:
        return f"it lies with {where}, which brings it to them"
    return f"{row.carried:,} of {row.ready:,} ready jobs of the queue lie with {where}"


def _held_back(held: Held) -> str:
    """Which limit a ready job waits for, and until when."""
    who = f"queue {held.name!r}" if held.queue else f"{held.name!r}"
    who += f" for key {held.key!r}" if held.key else ""
    terms = held.terms
    when = "" if held.until == float("inf") else f"; the next may start in {held.until:.3g} s"
    if held.broken:
        breaker = terms.breaker
        assert breaker is not None
        tried = when or "; one is being tried now"
        return f"It waits for the breaker of {who}: {breaker[0]} attempts failed in a row{tried}"
    if terms.concurrency is not None and held.running >= terms.concurrency:
        return f"It waits for the limit of {who}: {held.running} of {terms.concurrency} are running"
    if terms.rate is not None and not terms.rate[0]:
        return f"It waits for the limit of {who}, whose rate of 0 lets nothing start"
    return f"It waits for the limit of {who}, {terms_text(terms)}{when}"


SHOWN = 5
"""Jobs before one that are named at most."""


def _waits_for(record: Record) -> str:
    links, pending = record.envelope.links, record.pending
    assert links is not None
    if links.waits == Waits.BARRIER:
        failed = f"; {record.failures} did not succeed" if record.failures else ""
        return f"It stands for a group, of which {pending} job(s) have not ended{failed}"
    how = "succeed" if links.waits == Waits.SUCCESS else "end"
    only = ", and is forgotten if all succeed" if links.waits == Waits.FAILURE else ""
    return f"It waits for {pending} job(s) before it to {how}{only}"


def _before(broker: Broker, record: Record) -> list[Record]:
    """The jobs whose ends are handed to this one, as far as they are there."""
    links = record.envelope.links
    ids = links.inputs[:SHOWN] if links is not None else ()
    return [found for found in broker.wait_for(ids, 0) if found is not None] if ids else []


def _ok(record: Record) -> bool:
    return record.state is State.SUCCEEDED


def _cause(broker: Broker, record: Record) -> Record | None:
    """The job at the start of a row of jobs that ended for how the one before had ended."""
    found = None
    while was_dropped(record):
        bad = [r for r in _before(broker, record) if r.state.finished and not _ok(r)]
        if not bad:
            break
        found = record = bad[0]
    return found
