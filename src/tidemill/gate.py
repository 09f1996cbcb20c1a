"""The arithmetic of limits: when the next job may start. No clock, no store and no job is here.

A limit has :class:`Terms`, which people set; a :class:`Gate` is what a broker remembers of it for a
queue, or for one key. How many jobs run at the moment the broker counts itself. Times are whole
microseconds of the broker's clock.

A bucket is one number: when it will be full again (the generic cell rate algorithm, ITU-T I.371).
A window is a row of slots, each a 64th of it; what started in a slot counts until the whole slot
has left the window, so there are never more than allowed in any window, wherever it begins.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

__all__ = [
    "NEVER",
    "Claim",
    "Gate",
    "Held",
    "LimitStats",
    "Terms",
    "change",
    "clear_at",
    "ended",
    "give_back",
    "hold",
    "hold_to",
    "let_go",
    "opens",
    "room",
    "take",
    "tokens",
]

NEVER = 2**63 - 1
"""A time that does not come by itself: a job must end first, or somebody change the limit."""

_MICRO = 1_000_000
_SLOTS = 64
_SLACK = 1.0  # microseconds that sums of fractions may be off


class Terms(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a limit allows. None means no limit of that kind.

    Attributes:
        rate: (jobs, seconds): a bucket of ``burst`` tokens that gets so many in that time. A job
            takes one, or as many as it costs. No jobs: nothing starts.
        burst: tokens that the bucket holds at most.
        window: (jobs, seconds): never more than that start within any such time.
        concurrency: jobs that run at a time.
        breaker: (failures, seconds): after so many failed attempts in a row nothing starts for that
            time; then one job at a time, until one succeeds. After a first failure no more run at a
            time than may fail yet.
    """

    rate: tuple[float, float] | None = None
    burst: float = 1.0
    window: tuple[float, float] | None = None
    concurrency: int | None = None
    breaker: tuple[int, float] | None = None

    @property
    def every(self) -> float:
        """Microseconds from one token to the next; 0 where there is no bucket."""
        return self.rate[1] * _MICRO / self.rate[0] if self.rate and self.rate[0] else 0.0


class Claim(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The limit a job is under, as its envelope has it.

    Attributes:
        name: the limit's.
        key: who the job is for: each key has the limit for itself, and keys take turns. Empty for
            a limit that is one for all.
        cost: tokens the job takes.
        terms: as its producer declares them. They hold until a producer declares others, or
            somebody sets others by hand: those stay.
    """

    name: str
    key: str = ""
    cost: float = 1.0
    terms: Terms = Terms()


class Gate(msgspec.Struct, array_like=True, gc=False):
    """What is remembered of a limit.

    Attributes:
        full: when the bucket is full again.
        slots: (end of the slot, jobs that started in it), in order.
        failures: failed attempts in a row.
        until: when the breaker lets the next job try.
        held: what jobs cost together that lie with a carrier. They take their tokens when they
            start, and until then nobody else can.
    """

    full: float = 0.0
    slots: list[tuple[int, float]] = []
    failures: int = 0
    until: int = 0
    held: float = 0.0


class Held(msgspec.Struct, frozen=True):
    """What keeps a ready job waiting: a limit, or the gate of its queue.

    ``until`` is seconds from now; infinity when no time opens it. ``running`` and ``concurrency``
    say how many run, of how many that may; None when it is not for that.
    """

    name: str
    key: str = ""
    queue: bool = False
    until: float = float("inf")
    running: int = 0
    terms: Terms = Terms()
    broken: bool = False


class LimitStats(msgspec.Struct, kw_only=True, frozen=True):
    """A limit in numbers: of a queue, or of a name, then over all its keys.

    ``until`` is seconds until a job can start again, 0 when one could now, infinity when no time
    opens it; of a queue. ``keys`` are those in use; of a name. ``declared`` is what code said last;
    ``by_hand`` says that the terms are somebody's, and not the code's.
    """

    name: str
    queue: bool = False
    terms: Terms = Terms()
    declared: Terms | None = None
    by_hand: bool = False
    running: int = 0
    failures: int = 0
    until: float = 0.0
    keys: int = 0


class Setting(Protocol):
    """What a broker keeps of a limit that people and code set."""

    terms: Terms
    declared: Terms | None
    by_hand: bool


def hold_to(limit: Setting, terms: Terms | None, *, declared: bool) -> Terms:
    """Note what code declares, or a person sets: what has held up to now, for ``limit.terms``.

    What was set by hand stays whatever code declares, until None, by hand, has the code's hold.
    """
    old = limit.terms
    if declared:
        limit.declared = terms
    else:
        limit.by_hand = terms is not None
    if not (declared and limit.by_hand):
        limit.terms = terms or limit.declared or Terms()
    return old


def tokens(terms: Terms, gate: Gate, now: int) -> float:
    """Tokens in the bucket; less than 0 when a job took more than there were."""
    return terms.burst - max(0, gate.full - now) / terms.every if terms.every else terms.burst


def opens(terms: Terms, gate: Gate, running: int, now: int, cost: float = 1.0) -> int:
    """When a job of that cost may start: 0 now, ``NEVER`` when no time alone opens the gate."""
    when = 0
    if terms.concurrency is not None and running >= terms.concurrency:
        return NEVER
    if terms.breaker is not None and gate.failures >= terms.breaker[0]:
        when = gate.until
    if when <= now and running >= _most_running(terms, gate):
        return NEVER
    if terms.rate is not None:
        if not terms.every:
            return NEVER
        spare = terms.burst - gate.held - min(cost, terms.burst)
        if gate.held and spare < 0:
            return NEVER
        when = max(when, int(gate.full - spare * terms.every - _SLACK))
    if terms.window is not None:
        when = max(when, _window_opens(terms.window, gate, now, cost))
    return when if when > now else 0


def _most_running(terms: Terms, gate: Gate) -> int:
    """How many jobs may run at a time: after a failure no more than may fail yet, but one."""
    most = NEVER if terms.concurrency is None else terms.concurrency
    if terms.breaker is not None and gate.failures:
        most = min(most, max(1, terms.breaker[0] - gate.failures))
    return most


def _window_opens(window: tuple[float, float], gate: Gate, now: int, cost: float) -> int:
    most, length = window[0], int(window[1] * _MICRO)
    if not most:
        return NEVER
    live = [(end + length, count) for end, count in gate.slots if end + length > now]
    used, need, when = gate.held + sum(count for _, count in live), min(cost, most), 0
    for leaves, count in live:
        if used + need <= most:
            break
        used, when = used - count, leaves
    return NEVER if gate.held and used + need > most else when


def room(terms: Terms, gate: Gate, running: int, now: int, most: int) -> int:
    """How many jobs that cost 1 may start now, ``most`` at most."""
    if terms.breaker is not None and opens(terms, gate, running, now):
        return 0
    free: float = min(most, _most_running(terms, gate) - running)
    if terms.rate is not None:
        every = terms.every
        if not every:
            return 0
        spare = (terms.burst - gate.held) * every
        free = min(free, (spare - max(0, gate.full - now) + _SLACK) / every)
    if terms.window is not None:
        length = int(terms.window[1] * _MICRO)
        used = gate.held + sum(n for end, n in gate.slots if end + length > now)
        free = min(free, terms.window[0] - used)
    if free < 1 <= most:  # one that is open by a hair
        return 0 if opens(terms, gate, running, now) else 1
    return max(0, int(free))


def take(terms: Terms, gate: Gate, now: int, cost: float = 1.0) -> None:
    """A job of that cost starts, or several that cost so much together."""
    if terms.every:
        gate.full = max(gate.full, now) + cost * terms.every
    if terms.window is not None and cost:
        length = int(terms.window[1] * _MICRO)
        width = max(1, length // _SLOTS)
        slots = [slot for slot in gate.slots if slot[0] + length > now]
        end = (now // width + 1) * width
        if slots and slots[-1][0] >= end:
            slots[-1] = slots[-1][0], slots[-1][1] + cost
        else:
            slots.append((end, cost))
        gate.slots = slots


def give_back(terms: Terms, gate: Gate, taken: int, cost: float = 1.0) -> None:
    """A job that was taken at that time has not run.

    Its slot of the window counts it no more; a later one would let too many start in its stead.
    """
    gate.full -= cost * terms.every
    if terms.window is None:
        return
    width = max(1, int(terms.window[1] * _MICRO) // _SLOTS)
    for number, (end, count) in enumerate(gate.slots):
        if end > taken:
            if end - width <= taken:
                gate.slots[number] = end, max(0.0, count - cost)
            return


def hold(terms: Terms, gate: Gate, taken: int, cost: float = 1.0) -> None:
    """A job that was taken at that time goes to a carrier, and starts nobody knows when."""
    give_back(terms, gate, taken, cost)
    gate.held += cost


def let_go(gate: Gate, cost: float = 1.0) -> None:
    """A job lies with the carrier no more."""
    gate.held = max(0.0, gate.held - cost)


def ended(terms: Terms, gate: Gate, now: int, *, well: bool) -> None:
    """An attempt has succeeded, or failed: what the breaker goes by."""
    if terms.breaker is not None:
        gate.failures = 0 if well else gate.failures + 1
        if gate.failures >= terms.breaker[0]:
            gate.until = now + int(terms.breaker[1] * _MICRO)


def change(old: Terms, new: Terms, gate: Gate, now: int) -> None:
    """Other terms hold from now on: the tokens stay, as far as the new bucket holds them."""
    if gate.full <= now or new.rate is None:
        gate.full = 0.0
    elif new.every and old.every:
        left = min(new.burst, tokens(old, gate, now))
        gate.full = now + (new.burst - left) * new.every
    elif new.every:
        gate.full = min(gate.full, now + new.burst * new.every)
    if new.window is None:
        gate.slots = []
    if new.breaker is None:
        gate.failures = 0


def clear_at(terms: Terms, gate: Gate) -> int:
    """From when on a gate is as if it had never been used, if it is not used until then."""
    last = gate.slots[-1][0] + int(terms.window[1] * _MICRO) if gate.slots and terms.window else 0
    return max(int(gate.full) + 1 if gate.full else 0, last)
