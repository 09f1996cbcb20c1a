"""Choose the next jobs for an owner, and lease them."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.brokers.rules.limits import first_of, is_open, start, turn_of
from tidemill.brokers.rules.transitions import LOST, MESSAGES, TASKS, Item, Jobs, Ready
from tidemill.brokers.rules.workflows import inputs_of
from tidemill.core.envelope import Envelope, encode_envelope
from tidemill.core.job import DEFAULT_TTR, Lease, Owner


def lease(jobs: Jobs, owner: Owner, want: Want) -> Iterator[Lease]:
    for number in range(want.count):
        chosen = choose(jobs, want, first=number == 0)
        if not chosen:
            return
        yield start_lease(jobs, jobs.items[chosen], owner)


def start_lease(jobs: Jobs, item: Item, owner: Owner) -> Lease:
    turn = turn_of(jobs, item)
    jobs.run(item, owner)
    start(jobs, item, item.token)
    ttr = 0.0
    if owner.kind == "consumer":
        ttr = ttr_of(item.record.envelope)
        item.deadline = jobs.now + ttr
        jobs.look_at(item, item.deadline)
    return _lend(jobs, item, item.token, turn, ttr)


def ttr_of(envelope: Envelope) -> float:
    return envelope.ttr if envelope.ttr > 0 else DEFAULT_TTR


def _lend(jobs: Jobs, item: Item, token: int, turn: int, ttr: float) -> Lease:
    r, e = item.record, item.record.envelope
    envelope, inputs = encode_envelope(e), inputs_of(jobs, item)
    counts = r.attempt + 1, r.losses, r.rank, turn
    return Lease(token, *counts, e.timeout, r.leased, ttr, envelope, inputs)


def _heads(jobs: Jobs, want: Want, kinds: list[int]) -> dict[str, Ready]:
    """The first job of these kinds in each queue that is not paused and whose limit has room."""
    heads: dict[str, Ready] = {}
    for name in want.queues or sorted({name for name, _ in jobs.ready}):
        if not any(jobs.ready.get((name, kind)) for kind in kinds):
            continue
        if jobs.queue(name).paused or not is_open(jobs, name):
            continue
        firsts = [f for kind in kinds if (f := first_of(jobs, (name, kind)))]
        if firsts:
            heads[name] = min(firsts)
    return heads


def choose(jobs: Jobs, want: Want, *, first: bool) -> str:
    """The id of the next job for this want, or an empty string."""
    # Only as the ``first`` job, and if the want allows it, a task may be chosen that must run
    # alone.
    lost = _heads(jobs, want, [LOST]) if first and want.alone and want.tasks else {}
    if lost:
        return min(lost.values())[2]
    kinds = [kind for kind, wanted in ((TASKS, want.tasks), (MESSAGES, want.messages)) if wanted]
    heads = _heads(jobs, want, kinds)
    if not heads:
        return ""
    if want.mode is Mode.MERGED:
        return min(heads.values())[2]
    if want.mode is Mode.FAIR:
        jobs.last_queue = min((n for n in heads if n > jobs.last_queue), default=min(heads))
        return heads[jobs.last_queue][2]
    return next(iter(heads.values()))[2]
