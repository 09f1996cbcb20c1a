"""The ends of leases: settled, given back or lost. Also the renewals and notes of leases."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.brokers.contract.broker import KEEP_ATTEMPTS
from tidemill.brokers.rules.claim import ttr_of
from tidemill.brokers.rules.limits import attempted, unstart
from tidemill.brokers.rules.put import follow
from tidemill.brokers.rules.transitions import Item, Jobs
from tidemill.brokers.shared.lost_jobs import lost_line
from tidemill.core.job import (
    CONSUMER_DIED,
    NOT_STARTED,
    Attempt,
    Note,
    Outcome,
    State,
    Verdict,
    delay_of,
    run_of,
    was_held,
    whole_progress,
)
from tidemill.core.verdicts import COUNTED, MAY_NOT_HAVE_RUN, end_of, outcome_of

_LOG_MOST = 100


def settle(jobs: Jobs, owner: str, verdict: Verdict) -> bool:
    """End a lease by its verdict; False when the lease was lost and nothing changed."""
    item = jobs.leases.get((owner, verdict.token))
    if item is None:
        return False
    close_attempt(jobs, item, verdict)
    follow(jobs, verdict.followers)
    jobs.tell()
    return True


def close_attempt(jobs: Jobs, item: Item, verdict: Verdict) -> None:
    """Record the attempt of a lease, and move the job to its next state."""
    record = item.record
    _refund_or_tell_breaker(jobs, item, verdict)
    if verdict.rank >= 0:
        record.rank = verdict.rank
    if verdict.outcome in COUNTED:
        record.attempt += 1
        record.attempts.append(_attempt(item, verdict))
        del record.attempts[:-KEEP_ATTEMPTS]
    outcome = outcome_of(verdict, record.attempt, item.limit)
    expired = bool(item.expires_machine) and item.expires_machine <= jobs.now
    end = end_of(verdict, outcome, cancelling=record.cancelling, expired=expired)
    if end is not None:
        record.raw_result = verdict.result if outcome is Outcome.SUCCESS else record.raw_result
        jobs.finish(item, *end)
    else:
        _go_on(jobs, item, verdict)


def _refund_or_tell_breaker(jobs: Jobs, item: Item, verdict: Verdict) -> None:
    ran = bool(verdict.started) or was_held(item.record.attempts, item.record.leased)
    if verdict.outcome in (Outcome.SUCCESS, Outcome.RETRY, Outcome.FAIL):
        attempted(jobs, item, well=verdict.outcome == Outcome.SUCCESS)
    elif verdict.outcome in MAY_NOT_HAVE_RUN and not ran:
        unstart(jobs, item)


def _go_on(jobs: Jobs, item: Item, verdict: Verdict) -> None:
    """Retry, snooze or release a job; a retry with ``hold`` keeps the lease."""
    record = item.record
    if verdict.outcome == Outcome.RETRY:
        jobs.queue(record.envelope.queue).retried += 1
        if verdict.hold:
            return
    is_snoozed = verdict.outcome == Outcome.SNOOZE
    record.error = verdict.error if is_snoozed else ""  # the reason for the snooze
    jobs.move(item, *jobs.due_after(delay_of(verdict, record.envelope, record.attempt)))


def _attempt(item: Item, verdict: Verdict) -> Attempt:
    r, v = item.record, verdict
    times = r.leased, v.started, v.ended
    run = run_of(r.attempts, r.attempt)
    return Attempt(r.attempt, r.worker, *times, Outcome(v.outcome), v.error, v.traceback, run)


def touch(jobs: Jobs, owner: str, token: int, seconds: float) -> bool:
    """Restart the ttr (time to run) of a message lease; False when the lease was lost."""
    item = jobs.leases.get((owner, token))
    if item is None:
        return False
    if item.deadline:
        item.deadline = jobs.now + (seconds or ttr_of(item.record.envelope))
        jobs.look_at(item, item.deadline)
    return True


def note(jobs: Jobs, owner: str, note: Note) -> None:
    item = jobs.leases.get((owner, note.token))
    if item is None:
        return
    if note.done >= 0:
        item.record.progress = whole_progress(note.done, note.total)
        item.record.progress_text = note.text
    if note.line:
        log(item, note.line, note.time)


def log(item: Item, line: str, time: float) -> None:
    item.record.log.append((time, line))
    del item.record.log[:-_LOG_MOST]


def release_owner(jobs: Jobs, owner: str, causes: Mapping[int, str] | None) -> int:
    """Give back the jobs of a dead owner, by the causes of a witness; return their number."""
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
    """Give back a vanished owner's lease: a message with a failed attempt, a task with a loss."""
    # A task fails after as many losses as it has attempts.
    record = item.record
    if record.envelope.is_message:
        died = Verdict(item.token, Outcome.RETRY, error=CONSUMER_DIED, ended=jobs.wall)
        close_attempt(jobs, item, died)
        return
    record.losses += 1
    log(item, lost_line(jobs.wall - record.leased, record.worker), jobs.wall)
    if item.limit and record.losses >= item.limit:
        why = f"lost with its worker: loss {record.losses} of {item.limit}"
        jobs.finish(item, State.FAILED, why)
    else:
        # Without a witness, nobody knows whether the task ran.
        close_attempt(jobs, item, Verdict(item.token, Outcome.RELEASE, started=record.leased))
