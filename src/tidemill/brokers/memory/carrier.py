"""Leases that lie with the carrier (a message broker): given to it, taken, and recalled."""

from __future__ import annotations

from tidemill.brokers.memory.claim import ttr_of
from tidemill.brokers.memory.limits import restart
from tidemill.brokers.memory.transitions import Item, Jobs
from tidemill.core.owner import Owner


def may_be_carried(jobs: Jobs, item: Item) -> bool:
    """False when the lease must go back: the job expires, is cancelled, or changes its store."""
    over = item.expires_machine and item.expires_machine <= jobs.now
    return not over and not item.record.cancelling and jobs.departure is None


def take(jobs: Jobs, owner: Owner, token: int, job_id: str) -> bool:
    """Give a carried lease to an owner; False without such a lease, or when its job went back."""
    item = jobs.carried.get(token)
    if item is None or item.record.envelope.id != job_id:
        return False
    envelope = item.record.envelope
    if jobs.departure is not None or jobs.queue(envelope.queue).paused:
        _give_back(jobs, item)
        return False
    jobs.take_over(item, owner)
    restart(jobs, item)
    if owner.kind == "consumer":
        item.deadline = jobs.now + ttr_of(envelope)
        jobs.look_at(item, item.deadline)
    return True


def recall(jobs: Jobs) -> int:
    """Give back all carried leases; return their number."""
    carried = list(jobs.carried.values())
    for item in carried:
        _give_back(jobs, item)
    return len(carried)


def _give_back(jobs: Jobs, item: Item) -> None:
    jobs.move(item, 0.0, 0.0)
    jobs.tell()
