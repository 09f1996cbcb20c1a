"""Checks of queues: jobs that nobody takes, old jobs, closed limits, unknown tasks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope
from tidemill.core.job import State
from tidemill.core.verdicts import waits_for_its_task
from tidemill.core.words import counted
from tidemill.doctor.findings import Finding, Seen
from tidemill.doctor.words import duration
from tidemill.limits.arithmetic import LimitStats

OLD = 300.0  # seconds after which a ready job counts as old
_LOOK = 500  # the most scheduled jobs that the check of unknown tasks looks at
_SAMPLE = 50
_MOST = 10  # the most queues, limits or tasks of one kind that the report lists


def backlog(seen: Seen) -> Iterator[Finding]:
    """Find queues whose jobs nobody takes, and queues with old jobs."""
    found = [finding for row in seen.queues if (finding := _of_queue(seen, row)) is not None]
    yield from found[:_MOST]
    if len(found) > _MOST:
        more = counted(len(found) - _MOST, "more queue")
        text = f"{more}: paused, without a worker, or with old jobs"
        yield Finding("queues", "warn", text, "tidemill queues")
    ages = [(_age(row), row.name) for row in seen.queues if row.oldest and not row.paused]
    worst, where = max(ages, default=(0.0, ""))
    if worst > OLD and found:
        return
    oldest = f"the oldest ready job of {where} is {duration(worst)} old"
    ready = sum(row.ready for row in seen.queues)
    some = f"{counted(ready, 'ready job')} in paused queues, or of unknown age"
    text = oldest if where else some if ready else "no job is ready"
    yield Finding("backlog", "ok", text)


def _of_queue(seen: Seen, row: QueueStats) -> Finding | None:
    name, ready = row.name, counted(row.ready, "ready job")
    is_lonely = name in seen.unserved and not seen.is_unserved
    if row.paused:
        text = f"queue {name} is paused with {ready}{', and has no worker' if is_lonely else ''}"
        advice = f"tidemill resume {shlex.quote(name)}"
        return Finding("queues", "warn", text, advice, name, "paused")
    if is_lonely:
        advice = f"start one: tidemill worker MODULE:VAR -Q {shlex.quote(name)}"
        text = f"queue {name} has {ready} and no worker"
        return Finding("queues", "warn", text, advice, name, "no worker")
    if not row.oldest or _age(row) <= OLD or name in seen.unserved:
        return None
    old = f"queue {name} has {ready}, the oldest {duration(_age(row))} old"
    show = f"tidemill jobs --queue {shlex.quote(name)} --state ready"
    if not seen.serving(name) and not seen.consuming(name):
        text = f"{old}, and no consumer lives"
        return Finding("backlog", "warn", text, f"start one; {show}", name, "no consumer")
    advice = f"add workers or slots, or raise a limit; {show}"
    return Finding("backlog", "warn", old, advice, name, "old jobs")


def _age(row: QueueStats) -> float:
    return clock.wall() - row.oldest


def closed_limits(seen: Seen) -> Iterator[Finding]:
    """Find queues whose breaker or limit lets no job start."""
    if Feature.LIMITS not in seen.broker.features:
        return
    ready = {row.name: row.ready for row in seen.queues}
    found = (_of_limit(row, ready.get(row.name, 0)) for row in seen.limits if row.queue)
    closed = [finding for finding in found if finding is not None]
    yield from closed[:_MOST]
    if len(closed) > _MOST:
        text = f"limits of {counted(len(closed) - _MOST, 'more queue')} let no job start"
        yield Finding("limits", "warn", text, "tidemill limit")


def _of_limit(row: LimitStats, waiting: int) -> Finding | None:
    breaker, rate, name = row.terms.breaker, row.terms.rate, row.name
    show = f"tidemill jobs --queue {shlex.quote(name)}"
    if breaker is not None and row.failures >= breaker[0]:
        text = f"{counted(row.failures, 'attempt')} failed in a row: the breaker of queue {name}"
        if not row.until:
            return Finding("limits", "warn", f"{text} tries one job", show, name, "breaker tries")
        lasts = f" for {duration(row.until)} more" if row.until < float("inf") else ""
        return Finding("limits", "warn", f"{text} is open{lasts}", show, name, "breaker open")
    if waiting and ((rate is not None and not rate[0]) or row.terms.concurrency == 0):
        wait = f"{counted(waiting, 'ready job')} {'waits' if waiting == 1 else 'wait'}"
        text = f"the limit of queue {name} lets no job start, and {wait}"
        advice = f"tidemill limit {shlex.quote(name)} --queue --rate 10/s --concurrency none"
        return Finding("limits", "warn", text, advice, name, "limit closed")
    return None


def state_of_limit(row: LimitStats) -> str:
    """Why a limit lets no job start now, in a few words; empty if jobs may start."""
    breaker, most = row.terms.breaker, row.terms.concurrency
    known = 0 < row.until < float("inf")
    if breaker is not None and row.failures >= breaker[0]:
        lasts = f" for {duration(row.until)} more" if known else ""
        now = f"open{lasts}" if row.until else "tries one job"
        return f"breaker {now}, after {row.failures:,} failures in a row"
    if most is not None and row.running >= most * max(row.keys, 1):
        return "all places are taken"
    if known:
        return f"the next job starts in {duration(row.until)}"
    return "lets no job start" if row.until else ""


def unknown_tasks(seen: Seen) -> Iterator[Finding]:
    """Find tasks that no worker has known so far, among the scheduled jobs accepted last."""
    if not any(row.scheduled for row in seen.queues):
        return
    what = Filter(states=frozenset({State.SCHEDULED}), look=_LOOK)
    page = seen.broker.find(what, _LOOK)
    tasks: dict[str, list[Envelope]] = {}
    for record in filter(waits_for_its_task, page.records):
        tasks.setdefault(record.envelope.task, []).append(record.envelope)
    for task, jobs in sorted(tasks.items())[:_MOST]:
        names = sorted({job.queue for job in jobs})
        queues = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        age = duration(max(0.0, clock.wall() - min(job.created for job in jobs)))
        number = f"{len(jobs):,} or more jobs" if page.cursor else counted(len(jobs), "job")
        problem = f"no worker knows task {task}: {number} of queue {queues}"
        text = f"{problem}, tried again every 30 s at most, the oldest {age} old"
        advice = f"start a worker whose app has {task}, or tidemill cancel --task {task}"
        yield Finding("tasks", "warn", text, advice, task=task)
    if len(tasks) > _MOST:
        text = f"no worker knows {counted(len(tasks) - _MOST, 'more task')}"
        yield Finding("tasks", "warn", text, "start workers whose apps have them")


def asked_for(seen: Seen) -> Iterator[Finding]:
    """Find queues of a message broker that have ready jobs and no consumers."""
    for row in seen.queues:
        if row.ready and not row.consumers:
            jobs = counted(row.ready, "ready job")
            text = f"queue {row.name} has {jobs}, and nobody asks for more"
            advice = "start a worker; if all workers are busy with long jobs, add slots"
            yield Finding("queues", "warn", text, advice, row.name, "no consumer")
    ready = sum(row.ready for row in seen.queues)
    text = f"{counted(ready, 'ready job')} in {counted(len(seen.queues), 'queue')}"
    yield Finding("backlog", "ok", text)
