"""Explain in one sentence why a job is where it is: ``tidemill explain``."""

from __future__ import annotations

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.store import Store
from tidemill.client.trail import attempt_text, is_stuck
from tidemill.core.clock import wall_time
from tidemill.core.dependencies import was_dropped
from tidemill.core.job import Owner, Record, RunOn, State
from tidemill.limits.arithmetic import Held
from tidemill.limits.declare import terms_text

__all__ = ["explain", "explain_in", "serving", "why_not_run"]

MOST_NAMED = 5
"""The largest number of parents that an explanation names."""


def explain_in(broker: Store, record: Record) -> str:
    """Explain a job with the settings, workers and limits of its store."""
    queue = record.envelope.queue
    [row] = [row for row in broker.stats() if row.name == queue] or [QueueStats(name=queue)]
    text = explain(record, paused=row.paused, workers=len(serving(broker, queue)))
    if record.state is State.READY and row.carried:
        text = f"{text}; {_carried(broker, row)}"
    if record.state is State.READY and not row.paused and Feature.LIMITS in broker.features:
        held = with_limits(broker, "explain").held(record.envelope.id)
        text = _limited(held) if held is not None else text
    if record.state is State.WAITING:
        parents = [r for r in _parents(broker, record) if r.state is not State.SUCCEEDED]
        named = ", ".join(f"{r.envelope.id} ({r.state})" for r in parents)
        return f"{text}: {named}" if named else text
    cause = _cause(broker, record) if was_dropped(record) else None
    if cause is None:
        return text
    return f"{text}; it began with job {cause.envelope.id}, which {cause.state}: {cause.error}"


def explain(record: Record, *, paused: bool, workers: int) -> str:
    """Explain a job from its record, its queue's pause, and the number of its queue's workers."""
    if record.state is State.READY:
        return _ready(record.envelope.queue, paused, workers)
    if record.unknown:
        return _unknown_task(record)
    if record.state is State.SCHEDULED:
        return _scheduled(record)
    if record.state is State.WAITING:
        return _waiting(record)
    if record.state is State.RUNNING:
        return _running(record)
    return f"It {record.state}" + (f": {record.error}" if record.error else "")


def serving(broker: Store, queue: str) -> list[Owner]:
    """The live workers that take jobs of a queue."""
    return [
        owner
        for owner in broker.owners()
        if owner.kind == "worker" and (not owner.queues or queue in owner.queues)
    ]


def why_not_run(record: Record) -> str:
    """Why a retry was refused, and how to run the job again nevertheless."""
    envelope, state = record.envelope, record.state
    key = envelope.key
    if state is State.SUCCEEDED and envelope.links is not None:
        return "it succeeded already, and jobs after it in its chain, group or flow went on"
    if state is State.SUCCEEDED:
        held = f", and holds its key {key!r} for a time" if key and envelope.unique else ""
        return f"it succeeded already{held}; retry with --force (force=True) runs it again"
    if key and state.finished:
        return (
            f"it {state}, and another job has its key {key!r}: an unfinished job, or a job that "
            "succeeded within its unique_for; in the second case retry with --force (force=True)"
        )
    return f"it is {state}"


# -- by state ------------------------------------------------------------------------------------


def _ready(queue: str, paused: bool, workers: int) -> str:
    if paused:
        return f"It is ready, but queue {queue!r} is paused: tidemill resume {queue}"
    if not workers:
        return f"It is ready, but no worker serves queue {queue!r}: start one"
    return f"It is ready and waits for a free slot among {workers} worker(s) of queue {queue!r}"


def _unknown_task(record: Record) -> str:
    left = record.due - wall_time()
    end = f"; it fails in {max(0.0, left):.3g} s if none comes" if record.due else ""
    name = record.envelope.task
    return f"It is set aside, as {record.error}: start a worker whose app has {name!r}{end}"


def _scheduled(record: Record) -> str:
    why = ", as it was put with a delay"
    if record.error:
        why = f": {record.error}"
    elif record.attempts and record.attempt:
        attempt = attempt_text(record, record.run, record.attempt)
        why = f": {attempt} failed ({record.attempts[-1].error})"
    return f"It waits for its time{why}"


def _waiting(record: Record) -> str:
    links, pending = record.envelope.links, record.pending
    if links is None:
        return f"It waits for the running job with the same key {record.envelope.key!r}"
    if links.waits == RunOn.BARRIER:
        failed = f"; {record.failures} did not succeed" if record.failures else ""
        return f"It stands for a group, of which {pending} job(s) have not ended{failed}"
    how = "succeed" if links.waits == RunOn.SUCCESS else "end"
    only = ", and is forgotten if all succeed" if links.waits == RunOn.FAILURE else ""
    return f"It waits for {pending} job(s) before it to {how}{only}"


def _running(record: Record) -> str:
    if is_stuck(record):
        return "Its latest run is stuck; the job is tried again when that run has been killed"
    asked = ", and was asked to cancel" if record.cancelling else ""
    attempt = attempt_text(record, record.run, record.attempt + 1)
    again = f" for {attempt}" if record.run > 1 else ""
    return f"It was leased by {record.worker}{again}{asked}"


# -- from the store ------------------------------------------------------------------------------


def _carried(broker: Store, row: QueueStats) -> str:
    """Where the ready jobs of a queue lie, when a carrier has some of them."""
    where = broker.url if broker.url.startswith("amqp") else "the carrier"
    if row.carried >= row.ready:
        return f"it lies with {where}, which delivers it to them"
    return f"{row.carried:,} of {row.ready:,} ready jobs of the queue lie with {where}"


def _limited(held: Held) -> str:
    """The limit that a ready job waits for, and the time of the next start."""
    name = f"queue {held.name!r}" if held.queue else f"{held.name!r}"
    name += f" for key {held.key!r}" if held.key else ""
    settings = held.terms
    when = "" if held.until == float("inf") else f"; the next may start in {held.until:.3g} s"
    if held.broken:
        breaker = settings.breaker
        assert breaker is not None
        tried = when or "; one is being tried now"
        return f"It waits for the breaker of {name}: {breaker[0]} attempts failed in a row{tried}"
    most = settings.concurrency
    if most is not None and held.running >= most:
        return f"It waits for the limit of {name}: {held.running} of {most} are running"
    if settings.rate is not None and not settings.rate[0]:
        return f"It waits for the limit of {name}, whose rate of 0 lets nothing start"
    return f"It waits for the limit of {name}, {terms_text(settings)}{when}"


def _parents(broker: Store, record: Record) -> list[Record]:
    """The jobs that a job waits for, as far as the store has them."""
    links = record.envelope.links
    ids = links.inputs[:MOST_NAMED] if links is not None else ()
    return [found for found in broker.wait_for(ids, 0) if found is not None] if ids else []


def _cause(broker: Store, record: Record) -> Record | None:
    """The first job of a row of jobs, each of which ended because of the job before it."""
    found = None
    while was_dropped(record):
        ended = [r for r in _parents(broker, record) if r.state.finished]
        failed = [r for r in ended if r.state is not State.SUCCEEDED]
        if not failed:
            break
        found = record = failed[0]
    return found
