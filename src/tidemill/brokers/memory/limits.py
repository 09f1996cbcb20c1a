"""Limits: which ready jobs may start, counted over all owners.

What is under a limit waits in its line with the others and is passed over. (A store with an index
keeps what may not start in a table of its own, so that nobody walks over it; what is leased, and
when, is the same.) A *lane* is one key of one limit. Of a lane only the first job of a line can be
next; and lanes with a key take turns: who was served stands behind those who were not.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.brokers.base import Want
from tidemill.brokers.memory.jobs import LOST, MESSAGES, Item, Jobs, Limited, Line, Ready
from tidemill.gate import (
    NEVER,
    Claim,
    Gate,
    Held,
    LimitStats,
    Terms,
    change,
    clear_at,
    ended,
    give_back,
    hold,
    hold_to,
    let_go,
    opens,
    room,
    take,
)
from tidemill.job import State

__all__ = [
    "attempted",
    "declare",
    "first_of",
    "held",
    "is_open",
    "next_opening",
    "restart",
    "set_aside",
    "set_limit",
    "show",
    "start",
    "sweep",
    "turn_of",
    "unstart",
]


def micros(jobs: Jobs) -> int:
    """Now, as gates count."""
    return int(jobs.now * 1e6)


# -- setting -------------------------------------------------------------------------------------


def set_limit(jobs: Jobs, name: str, terms: Terms | None, *, queue: bool, declared: bool) -> None:
    """Have these terms hold, at once."""
    table = jobs.queue_limits if queue else jobs.limits
    if queue:
        jobs.queue(name)
    known = table.get(name)
    if known is None:
        known = table[name] = Limited()
        known.gate.held = jobs.queue(name).carried if queue else 0.0
    old = hold_to(known, terms, declared=declared)
    if known.terms != old:
        lanes = [lane.gate for (whose, _), lane in jobs.lanes.items() if whose == name]
        for gate in [known.gate] if queue else lanes:
            change(old, known.terms, gate, micros(jobs))


def declare(jobs: Jobs, claim: Claim | None, *, anew: bool = True) -> None:
    """A job is stored that brings a limit along; without ``anew`` a known one stays."""
    if claim is not None and (anew or claim.name not in jobs.limits):
        set_limit(jobs, claim.name, claim.terms, queue=False, declared=True)


# -- asking --------------------------------------------------------------------------------------


def is_open(jobs: Jobs, queue: str) -> bool:
    """Whether a job of the queue may start now, as far as the queue's own limit goes."""
    return not _queue_opens(jobs, queue)


def first_of(jobs: Jobs, line: Line, owner: str, want: Want) -> Ready | None:
    """(rank, turn, id) of the job of a line that is next, for who takes by this want."""
    entries = jobs.ready.get(line, [])
    if not jobs.limits:
        return entries[0] if entries else None
    return min(_may_start(jobs, entries, owner, want), default=None)


def turn_of(jobs: Jobs, item: Item) -> int:
    """Where a job stands among those of its priority: its sequence, or the turn of its lane."""
    claim = item.record.envelope.limit
    return max(item.record.seq, jobs.lane(claim).turn if claim and claim.key else 0)


def _may_start(jobs: Jobs, entries: list[Ready], owner: str, want: Want) -> Iterator[Ready]:
    for item, claim in _fronts(jobs, entries):
        closed = claim is not None and _lane_opens(jobs, claim)
        if not closed and not (claim and _leave_place(jobs, item, claim, owner, want)):
            yield item.record.rank, turn_of(jobs, item), item.record.envelope.id


def _leave_place(jobs: Jobs, item: Item, claim: Claim, owner: str, want: Want) -> bool:
    """Whether older jobs of the lane wait elsewhere for others, who sleep for them."""
    heirs: list[str] = []
    for (queue, kind), entries in jobs.ready.items() if want.queues else ():
        if kind == LOST or queue in want.queues:
            continue
        if jobs.queue(queue).paused or not is_open(jobs, queue):
            continue
        sleepers = [
            sleeper
            for sleeper, lacks in jobs.hungry.items()
            if sleeper != owner
            and (lacks.messages if kind == MESSAGES else lacks.tasks)
            and (not lacks.queues or queue in lacks.queues)
        ]
        for front, other in _fronts(jobs, entries):
            same = other is not None and (other.name, other.key) == (claim.name, claim.key)
            if sleepers and same and _age(front) < _age(item):
                heirs.append(sleepers[0])
    lane, terms = jobs.lane(claim), jobs.limits[claim.name].terms
    if not heirs or room(terms, lane.gate, lane.running, micros(jobs), len(heirs) + 1) > len(heirs):
        return False
    jobs.heirs.update(heirs)
    return True


def _age(item: Item) -> tuple[int, int]:
    return item.record.rank, item.record.seq


def _fronts(jobs: Jobs, entries: list[Ready]) -> Iterator[tuple[Item, Claim | None]]:
    """The first job of each lane of a line, and every job without a limit."""
    seen: set[tuple[str, str]] = set()
    for _, _, job_id in entries:
        item = jobs.items[job_id]
        claim = item.record.envelope.limit
        if claim is None:
            yield item, None
        elif (claim.name, claim.key) not in seen:
            seen.add((claim.name, claim.key))
            yield item, claim


def _queue_opens(jobs: Jobs, queue: str) -> int:
    limited = jobs.queue_limits.get(queue)
    if limited is None:
        return 0
    return opens(limited.terms, limited.gate, _running(jobs, queue), micros(jobs))


def _running(jobs: Jobs, queue: str) -> int:
    """How many jobs of a queue have been leased; what is carried, too, keeps its place."""
    row = jobs.queue(queue)
    return row.running + row.carried


def _lane_opens(jobs: Jobs, claim: Claim) -> int:
    lane, terms = jobs.lane(claim), jobs.limits[claim.name].terms
    return opens(terms, lane.gate, lane.running, micros(jobs), claim.cost)


def next_opening(jobs: Jobs) -> float:
    """Seconds until a limit lets a ready job start that may not now; infinity when none will."""
    rows = [jobs.queue(name) for name in jobs.queue_limits]
    times = [_queue_opens(jobs, row.name) for row in rows if row.ready > row.carried]
    if jobs.limits:
        for entries in jobs.ready.values():
            times += [_lane_opens(jobs, claim) for _, claim in _fronts(jobs, entries) if claim]
    times = [when for when in times if 0 < when < NEVER]
    return min(times) / 1e6 - jobs.now if times else float("inf")


# -- starting and ending -------------------------------------------------------------------------


def start(jobs: Jobs, item: Item, number: int) -> None:
    """A job is leased: its tokens are taken, and its lane goes behind the others."""
    envelope, now = item.record.envelope, micros(jobs)
    limited = jobs.queue_limits.get(envelope.queue)
    if limited is not None:
        take(limited.terms, limited.gate, now)
    if envelope.limit is not None:
        lane = jobs.lane(envelope.limit)
        take(jobs.limits[envelope.limit.name].terms, lane.gate, now, envelope.limit.cost)
        lane.turn = number


def unstart(jobs: Jobs, item: Item) -> None:
    """A lease goes back and the job never ran: it gets its tokens back."""
    taken = _charged(jobs, item)
    for terms, gate, cost in _gates_of(jobs, item):
        if item.is_carried:
            let_go(gate, cost)
        else:
            give_back(terms, gate, taken, cost)


def set_aside(jobs: Jobs, item: Item) -> None:
    """A lease goes to the carrier: its tokens are taken when the job starts."""
    taken = _charged(jobs, item)
    for terms, gate, cost in _gates_of(jobs, item):
        hold(terms, gate, taken, cost)


def restart(jobs: Jobs, item: Item) -> None:
    """A job is taken from the carrier: now it starts."""
    for terms, gate, cost in _gates_of(jobs, item):
        let_go(gate, cost)
        take(terms, gate, micros(jobs), cost)
    item.charged = item.record.leased


def _gates_of(jobs: Jobs, item: Item) -> Iterator[tuple[Terms, Gate, float]]:
    """What a job is under, and what it costs there."""
    envelope = item.record.envelope
    limited = jobs.queue_limits.get(envelope.queue)
    if limited is not None:
        yield limited.terms, limited.gate, 1.0
    if envelope.limit is not None:
        terms = jobs.limits[envelope.limit.name].terms
        yield terms, jobs.lane(envelope.limit).gate, envelope.limit.cost


def _charged(jobs: Jobs, item: Item) -> int:
    """When its tokens were taken, as gates count."""
    return int((jobs.now - jobs.wall + item.charged) * 1e6)


def attempted(jobs: Jobs, item: Item, *, well: bool) -> None:
    """An attempt has ended: what a breaker goes by."""
    limited = jobs.queue_limits.get(item.record.envelope.queue)
    if limited is not None:
        ended(limited.terms, limited.gate, micros(jobs), well=well)


# -- showing -------------------------------------------------------------------------------------


def held(jobs: Jobs, job_id: str) -> Held | None:
    """What keeps a ready job waiting."""
    item = jobs.items.get(job_id)
    if item is None or item.record.state is not State.READY or item.is_carried:
        return None
    claim, queue = item.record.envelope.limit, item.record.envelope.queue
    when = _lane_opens(jobs, claim) if claim else 0
    if claim and when:
        terms, running = jobs.limits[claim.name].terms, jobs.lane(claim).running
        return Held(claim.name, claim.key, False, _seconds(jobs, when), running, terms)
    when = _queue_opens(jobs, queue)
    if not when:
        return None
    limited, running = jobs.queue_limits[queue], _running(jobs, queue)
    return Held(queue, "", True, _seconds(jobs, when), running, limited.terms, limited.is_broken)


def show(jobs: Jobs) -> list[LimitStats]:
    """Every limit in numbers."""
    queues = [
        LimitStats(
            name=name,
            queue=True,
            terms=limited.terms,
            declared=limited.declared,
            by_hand=limited.by_hand,
            running=_running(jobs, name),
            failures=limited.gate.failures,
            until=_seconds(jobs, _queue_opens(jobs, name)),
        )
        for name, limited in sorted(jobs.queue_limits.items())
    ]
    sweep(jobs)
    return queues + [
        LimitStats(
            name=name,
            terms=limited.terms,
            declared=limited.declared,
            by_hand=limited.by_hand,
            running=sum(lane.running for (whose, _), lane in jobs.lanes.items() if whose == name),
            keys=sum(whose == name for whose, _ in jobs.lanes),
        )
        for name, limited in sorted(jobs.limits.items())
    ]


def _seconds(jobs: Jobs, when: int) -> float:
    if not when:
        return 0.0
    return when / 1e6 - jobs.now if when < NEVER else float("inf")


def sweep(jobs: Jobs) -> None:
    """Forget lanes that nothing is in and that are as if they had never been used."""
    ready = [entry[2] for entries in jobs.ready.values() for entry in entries]
    claims = [jobs.items[job_id].record.envelope.limit for job_id in ready]
    used = {(claim.name, claim.key) for claim in claims if claim}
    for place, lane in list(jobs.lanes.items()):
        terms = jobs.limits[place[0]].terms
        if place not in used and not lane.running and clear_at(terms, lane.gate) <= micros(jobs):
            del jobs.lanes[place]
    for name, key in used:
        jobs.lane(Claim(name, key))
