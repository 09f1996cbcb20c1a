"""Choosing what an owner gets, and leasing it."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.brokers.base import DEFAULT_TTR, Mode, Want
from tidemill.brokers.memory.jobs import Item, Jobs
from tidemill.job import Envelope, Lease, Owner, State, encode_envelope

__all__ = ["lease", "ttr_of"]


def lease(jobs: Jobs, owner: Owner, want: Want) -> Iterator[Lease]:
    """Up to ``want.count`` jobs."""
    for _ in range(want.count):
        item = _choose(jobs, want)
        if item is None:
            return
        record, envelope = item.record, item.record.envelope
        if envelope.is_message and envelope.ttr == 0:  # at most once: gone when taken
            record.leased = jobs.wall
            yield _lend(item, jobs.next_number(), 0.0)
            jobs.finish(item, State.SUCCEEDED)
            continue
        jobs.run(item, owner)
        ttr = 0.0
        if owner.kind == "consumer":
            ttr = ttr_of(envelope)
            item.deadline = jobs.now + ttr
            jobs.look_at(item, item.deadline)
        yield _lend(item, item.token, ttr)


def ttr_of(envelope: Envelope) -> float:
    """Seconds a consumer has for a message."""
    return envelope.ttr if envelope.ttr > 0 else DEFAULT_TTR


def _lend(item: Item, token: int, ttr: float) -> Lease:
    r, envelope = item.record, item.record.envelope
    encoded = encode_envelope(envelope)
    return Lease(
        token, r.attempt + 1, r.losses, r.rank, r.seq, envelope.timeout, r.leased, ttr, encoded
    )


def _choose(jobs: Jobs, want: Want) -> Item | None:
    """The job that is next for this want, or None."""
    names = want.queues or sorted({name for name, _ in jobs.ready})
    kinds = [kind for kind, wanted in ((False, want.tasks), (True, want.messages)) if wanted]
    heads: dict[str, tuple[int, int, str]] = {}
    for name in names:
        lines = [jobs.ready[name, kind] for kind in kinds if jobs.ready.get((name, kind))]
        if lines and not jobs.queue(name).paused:
            heads[name] = min(line[0] for line in lines)
    if not heads:
        return None
    if want.mode is Mode.MERGED:
        return jobs.items[min(heads.values())[2]]
    if want.mode is Mode.FAIR:
        jobs.last_queue = min((n for n in heads if n > jobs.last_queue), default=min(heads))
        return jobs.items[heads[jobs.last_queue][2]]
    return jobs.items[next(iter(heads.values()))[2]]
