"""Choosing what an owner gets, and leasing it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidemill.brokers.base import DEFAULT_TTR, Mode, Want
from tidemill.brokers.memory.flows import inputs_of
from tidemill.brokers.memory.jobs import LOST, MESSAGES, TASKS, Item, Jobs, Ready
from tidemill.brokers.memory.limits import first_of, is_open, start, turn_of
from tidemill.brokers.memory.unknown import bring_back, limited, undo
from tidemill.job import Envelope, Lease, Owner, encode_envelope

__all__ = ["lease", "start_lease", "ttr_of"]


def lease(jobs: Jobs, owner: Owner, want: Want) -> list[Lease]:
    """Up to ``want.count`` jobs, those included that were set aside and that it knows."""
    back = bring_back(jobs, want)
    leases: list[Lease] = []
    if not want.tasks:
        leases += _lease_alone(jobs, owner, want, [item for item, _ in back])
    want = msgspec.structs.replace(want, count=want.count - len(leases))
    leases += _lease(jobs, owner, want)
    undo(jobs, want, back)
    return leases


def _lease_alone(jobs: Jobs, owner: Owner, want: Want, items: list[Item]) -> list[Lease]:
    """Just those of some jobs that no limit concerns: for an owner that takes no other tasks."""
    mine = [item for item in items if not item.record.losses and not limited(jobs, item)]
    return [start_lease(jobs, item, owner) for item in mine[: want.count]]


def _lease(jobs: Jobs, owner: Owner, want: Want) -> Iterator[Lease]:
    for number in range(want.count):
        item = _choose_lost(jobs, owner, want) if number == 0 else None
        item = item or _choose(jobs, owner, want)
        if item is None:
            return
        yield start_lease(jobs, item, owner)


def start_lease(jobs: Jobs, item: Item, owner: Owner) -> Lease:
    """Lease a job that is ready."""
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
    """Seconds a consumer has for a message."""
    return envelope.ttr if envelope.ttr > 0 else DEFAULT_TTR


def _lend(jobs: Jobs, item: Item, token: int, turn: int, ttr: float) -> Lease:
    r, e = item.record, item.record.envelope
    envelope, inputs = encode_envelope(e), inputs_of(jobs, item)
    counts = r.attempt + 1, r.losses, r.rank, turn
    return Lease(token, *counts, e.timeout, r.leased, ttr, envelope, inputs)


def _choose_lost(jobs: Jobs, owner: Owner, want: Want) -> Item | None:
    """The first task that is to run alone, if this want may have one."""
    heads = _heads(jobs, owner, want, [LOST]) if want.alone and want.tasks else {}
    return jobs.items[min(heads.values())[2]] if heads else None


def _heads(jobs: Jobs, owner: Owner, want: Want, kinds: list[int]) -> dict[str, Ready]:
    """By queue that may be served: the first of its jobs of these kinds."""
    heads: dict[str, Ready] = {}
    for name in want.queues or sorted({name for name, _ in jobs.ready}):
        if not any(jobs.ready.get((name, kind)) for kind in kinds):
            continue
        if jobs.queue(name).paused or not is_open(jobs, name):
            continue
        firsts = [f for kind in kinds if (f := first_of(jobs, (name, kind), owner.id, want))]
        if firsts:
            heads[name] = min(firsts)
    return heads


def _choose(jobs: Jobs, owner: Owner, want: Want) -> Item | None:
    """The job that is next for this want, or None."""
    kinds = [kind for kind, wanted in ((TASKS, want.tasks), (MESSAGES, want.messages)) if wanted]
    heads = _heads(jobs, owner, want, kinds)
    if not heads:
        return None
    if want.mode is Mode.MERGED:
        return jobs.items[min(heads.values())[2]]
    if want.mode is Mode.FAIR:
        jobs.last_queue = min((n for n in heads if n > jobs.last_queue), default=min(heads))
        return jobs.items[heads[jobs.last_queue][2]]
    return jobs.items[next(iter(heads.values()))[2]]
