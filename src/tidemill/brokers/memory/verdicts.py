"""What becomes of a lease: settled, renewed, noted, given back or lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidemill.brokers.base import KEEP_ATTEMPTS
from tidemill.brokers.memory.carrying import may_be_carried
from tidemill.brokers.memory.jobs import Item, Jobs
from tidemill.brokers.memory.leases import ttr_of
from tidemill.brokers.memory.limits import attempted, set_aside, unstart
from tidemill.brokers.memory.puts import follow
from tidemill.brokers.memory.unknown import set_aside as set_unknown_aside
from tidemill.job import (
    CONSUMER_DIED,
    NOT_STARTED,
    RELAY,
    WHILE_RUNNING,
    Attempt,
    Note,
    Outcome,
    Owner,
    State,
    Verdict,
    delay_of,
    run_of,
    was_held,
)

__all__ = [
    "TOO_LATE",
    "close_attempt",
    "hand_over",
    "log",
    "note",
    "release_owner",
    "settle",
    "touch",
]

TOO_LATE = "not started before it expired"
_LOG_MOST = 100
_BACK = (Outcome.RELEASE, Outcome.SNOOZE, Outcome.UNKNOWN)
_UNSTARTED = (Outcome.RELEASE, Outcome.UNKNOWN)
_TOLD = (Outcome.SUCCESS, Outcome.RETRY, Outcome.FAIL)
_END = {
    Outcome.FAIL: State.FAILED,
    Outcome.CANCELLED: State.CANCELLED,
    Outcome.EXPIRED: State.EXPIRED,
}


def settle(jobs: Jobs, owner: str, verdict: Verdict) -> bool:
    """Close a lease. False: it was lost, and nothing changed."""
    item = jobs.leases.get((owner, verdict.token))
    if item is None:
        return False
    if verdict.outcome != Outcome.CARRY:
        close_attempt(jobs, item, verdict)
    elif may_be_carried(jobs, item):
        set_aside(jobs, item)
        jobs.carry(item)
    else:
        close_attempt(jobs, item, Verdict(item.token, Outcome.RELEASE, error=NOT_STARTED))
    follow(jobs, verdict.followers)
    jobs.tell()
    return True


def close_attempt(jobs: Jobs, item: Item, verdict: Verdict) -> None:
    """Count and write down the attempt, and move the job on."""
    record, outcome = item.record, Outcome(verdict.outcome)
    ran = bool(verdict.started) or was_held(record.attempts, record.leased)
    if verdict.rank >= 0:
        record.rank = verdict.rank
    if outcome not in _BACK:
        record.attempt += 1
        record.attempts.append(_attempt(item, verdict))
        del record.attempts[:-KEEP_ATTEMPTS]
    if outcome in _TOLD:
        attempted(jobs, item, well=outcome is Outcome.SUCCESS)
    elif outcome in _UNSTARTED and not ran:
        unstart(jobs, item)
    if outcome is Outcome.RETRY and item.limit and record.attempt >= item.limit:
        outcome = Outcome.FAIL
    if outcome is Outcome.SUCCESS:
        record.result = verdict.result
        jobs.finish(item, State.SUCCEEDED)
    elif outcome in _END:
        jobs.finish(item, _END[outcome], verdict.error)
    elif record.cancelling:
        said = verdict.error if outcome is Outcome.RELEASE else ""
        said = NOT_STARTED if outcome is Outcome.UNKNOWN else said
        jobs.finish(item, State.CANCELLED, said or WHILE_RUNNING)
    elif item.expires_machine and item.expires_machine <= jobs.now:
        jobs.finish(item, State.EXPIRED, TOO_LATE)
    elif outcome is Outcome.UNKNOWN:
        record.error = verdict.error
        set_unknown_aside(jobs, item, verdict.delay)
    else:
        if outcome is Outcome.RETRY:
            jobs.queue(record.envelope.queue).retried += 1
            if verdict.hold:
                return
        record.error = verdict.error if outcome is Outcome.SNOOZE else ""  # why it waits
        delay = delay_of(verdict, record.envelope, record.attempt)
        jobs.move(item, *jobs.due_after(delay))


def _attempt(item: Item, verdict: Verdict) -> Attempt:
    r, v = item.record, verdict
    times = r.leased, v.started, v.ended
    run = run_of(r.attempts, r.attempt)
    return Attempt(r.attempt, r.worker, *times, Outcome(v.outcome), v.error, v.traceback, run)


def hand_over(jobs: Jobs, owners: Iterable[Owner], tokens: Iterable[int]) -> None:
    """What relays have published and not handed over yet goes to the carrier now."""
    relays = [owner.id for owner in owners if owner.kind == RELAY]
    for token in tokens:
        for relay in relays:
            settle(jobs, relay, Verdict(token, Outcome.CARRY))


def touch(jobs: Jobs, owner: str, token: int, seconds: float) -> bool:
    """Start a message lease's ttr anew. False: it was lost."""
    item = jobs.leases.get((owner, token))
    if item is None:
        return False
    if item.deadline:
        item.deadline = jobs.now + (seconds or ttr_of(item.record.envelope))
        jobs.look_at(item, item.deadline)
    return True


def note(jobs: Jobs, owner: str, note: Note) -> None:
    """Keep what a running job said."""
    item = jobs.leases.get((owner, note.token))
    if item is None:
        return
    if note.done >= 0:
        item.record.progress = (note.done, note.total)
    if note.line:
        log(jobs, item, note.line, note.time)


def log(jobs: Jobs, item: Item, line: str, time: float) -> None:
    """Add a line to a job's trail."""
    item.record.log.append((time, line))
    del item.record.log[:-_LOG_MOST]


def release_owner(jobs: Jobs, owner: str, causes: Mapping[int, str] | None) -> int:
    """Give back all that a dead owner held, by the witness's account; how many that was."""
    held = [(token, item) for (whose, token), item in jobs.leases.items() if whose == owner]
    for token, item in held:
        if causes is None:
            _lose(jobs, item)
        elif token in causes:
            fail = Verdict(token, Outcome.RETRY, error=causes[token], ended=jobs.wall)
            close_attempt(jobs, item, fail)
        else:
            close_attempt(jobs, item, Verdict(token, Outcome.RELEASE, error=NOT_STARTED))
    return len(held)


def _lose(jobs: Jobs, item: Item) -> None:
    """Give back a lease whose owner vanished: a message with a failed attempt, a task with a loss.

    A task fails after as many losses as it has attempts.
    """
    record = item.record
    if record.envelope.is_message:
        died = Verdict(item.token, Outcome.RETRY, error=CONSUMER_DIED, ended=jobs.wall)
        close_attempt(jobs, item, died)
        return
    record.losses += 1
    if item.limit and record.losses >= item.limit:
        jobs.finish(item, State.FAILED, f"lost {record.losses} times with its worker")
    else:  # it may have run
        close_attempt(jobs, item, Verdict(item.token, Outcome.RELEASE, started=record.leased))
