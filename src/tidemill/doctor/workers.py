"""Checks of workers, their leases, and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.store import clock_ahead
from tidemill.core.clock import clock
from tidemill.core.job import FINISHED, Owner, Record, State
from tidemill.core.scoreboard import runs_by_name
from tidemill.core.words import counted
from tidemill.doctor.findings import Finding, Seen
from tidemill.doctor.words import running_in_words

LATE = 60.0  # a running job counts as late when its timeout passed this many seconds ago
STRAY = 30.0  # a worker with free slots has a row for each lease older than this many seconds
SKEW = 1.0  # seconds by which the clock of a server may differ from the clock of this machine
WRONG = 5.0  # seconds by which the clock of a worker or producer may differ from the store's
_SAMPLE = 50


def alive(seen: Seen) -> Iterator[Finding]:
    """Find a store without workers."""
    workers = seen.workers
    slots = sum(owner.concurrency for owner in workers)
    consumers = counted(len(seen.owners) - len(workers), "consumer")
    text = f"{len(workers)} alive with {counted(slots, 'slot')}, {consumers}"
    if workers or not _needs_workers(seen):
        yield Finding("workers", "ok", text)
    elif len(seen.unserved) != 1:  # of one queue, the check of queues says so
        sizes = [row.size for row in seen.queues if row.size]
        jobs, queues = counted(sum(sizes), "unfinished job"), counted(len(sizes), "queue")
        wait = "waits" if sum(sizes) == 1 else "wait"
        text = f"no worker is alive, and {jobs} of {queues} {wait}"
        advice = "start one: tidemill worker MODULE:VAR"
        yield Finding("workers", "warn", text, advice, note="no worker alive")


def _needs_workers(seen: Seen) -> bool:
    """True when a sample of the unfinished jobs has a job of a task."""
    if not any(row.size for row in seen.queues):
        return False
    what = Filter(states=frozenset(State) - FINISHED)
    return any(not r.envelope.is_message for r in seen.broker.find(what, _SAMPLE).records)


def leases(seen: Seen) -> Iterator[Finding]:
    """Find running jobs that nobody works on, and jobs whose timeout has long passed."""
    broker, running, owners = seen.broker, seen.held.records, seen.owners
    names, stray = {owner.name for owner in owners}, _stray_tokens(owners, running)
    tests: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("held by a worker that is gone", lambda r: r.worker not in names, "start a worker"),
        ("past the timeout and still held", _is_late, "send the worker USR1 for its stacks"),
        (
            "held by a live worker that does not know of them",
            lambda r: r.token in stray,
            "end that worker with TERM: its jobs go to other workers",
        ),
    )
    # A job may have ended since the list was read. So a job that looks bad is read again.
    for what, is_bad, advice in tests:
        bad = [record.envelope.id for record in running if is_bad(record)]
        bad = [i for i in bad if (r := broker.get(i)) and r.state is State.RUNNING and is_bad(r)]
        if bad:
            text = f"{counted(len(bad), 'running job')} {what}, for example {bad[0]}"
            yield Finding("leases", "fail", text, f"{advice}; tidemill job {bad[0]}")
            return
    text = running_in_words(sum(row.running for row in seen.queues), seen.held.waiting())
    yield Finding("leases", "ok", f"{text}, held by live owners, within their time")


def _is_late(record: Record) -> bool:
    timeout = record.envelope.timeout
    return bool(timeout) and clock.wall() - record.leased > timeout + LATE


def _stray_tokens(owners: list[Owner], running: list[Record]) -> set[int]:
    """Tokens of old leases that the workers on this machine do not know."""
    # A worker with a free slot starts a leased job at once. So when a worker has free slots and no
    # row for an old lease on its scoreboard, it does not know this lease.
    found: set[int] = set()
    for name, runs in runs_by_name(owners).items():
        if runs is not None:
            slots = sum(owner.concurrency for owner in owners if owner.name == name)
            mine = [record for record in running if record.worker == name]
            waiting = {record.token for record in mine} - runs.keys()
            if len(mine) - len(waiting) < slots:
                old = {r.token for r in mine if clock.wall() - r.leased > STRAY}
                found |= waiting & old
    return found


def clocks(seen: Seen) -> Iterator[Finding]:
    """Check the clocks of this machine, of the producer of the newest job, and of workers."""
    now = clock.wall()
    if now < 1_700_000_000:
        text = f"the clock says {time.strftime('%Y-%m-%d', time.localtime(now))}"
        yield Finding("clock", "fail", text, "set the clock: at= and schedules go by it")
        return
    problems: list[tuple[str, str]] = []
    ahead = clock_ahead(seen.broker)
    if abs(ahead) > SKEW:
        text = f"the clock of the server is {abs(ahead):.1f} s {_which(-ahead)} this machine's"
        advice = "delays and schedules go by the server, at= by the producer: use NTP on both"
        problems.append((text, advice))
    newest = seen.broker.find(Filter(), 1).records
    future = newest[0].envelope.created - (now - ahead) if newest else 0.0
    if future > WRONG:
        text = f"the newest job was created {future:.0f} s in the future"
        problems.append((text, "the clock was set back, or a producer's clock is wrong: use NTP"))
    for owner in seen.owners:
        if abs(owner.ahead) > WRONG:
            text = f"the clock of worker {owner.name} was {abs(owner.ahead):.1f} s"
            text = f"{text} {_which(owner.ahead)} the store's when the worker started"
            problems.append((text, f"set the clock of {owner.host}: use NTP; restart the worker"))
    for text, advice in problems:
        yield Finding("clock", "warn", text, advice)
    if not problems:
        text = "wall time agrees with the newest job, the store and its workers"
        yield Finding("clock", "ok", text)


def _which(ahead: float) -> str:
    return "ahead of" if ahead > 0 else "behind"
