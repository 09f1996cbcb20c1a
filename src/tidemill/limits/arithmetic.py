"""The arithmetic of limits: when the next job may start. Pure functions without clock or store.

A limit has :class:`LimitSettings`, set by people or code. A :class:`Limiter` is the state that a
broker stores for a queue, or for one key of a limit. The broker itself counts the running jobs.
Times are whole microseconds of the broker's clock.

The state of a bucket is one number: the time at which the bucket is full again. (This is the
generic cell rate algorithm, ITU-T I.371.) A window is a list of slots, each a 64th of the window.
The start of a job counts until its whole slot has left the window. So no span of the window's
length has more starts than allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from tidemill.core.envelope import LimitSettings

NEVER = 2**63 - 1  # no known time: the limit opens when a job ends or its settings change
_MICRO = 1_000_000
_SLOTS = 64
_SLACK = 1.0  # microseconds of error in sums of fractions


class Limiter(msgspec.Struct, array_like=True, gc=False):
    """The state of the limit of a queue, or of one key of a named limit.

    Attributes:
        full: the time at which the bucket is full again.
        slots: (end of the slot, cost of the jobs that started in it), in order.
        failures: failed attempts in a row.
        until: the time at which an open breaker lets the next job start.
    """

    full: float = 0.0
    slots: list[tuple[int, float]] = []
    failures: int = 0
    until: int = 0


class Held(msgspec.Struct, frozen=True):
    """The limit of a ready job: a named limit, or the limit of its queue.

    Attributes:
        until: seconds until the limit lets the job start: 0 for now, infinity when not known.
        running: the number of running jobs under the limit.
        broken: True when the breaker is open.
    """

    name: str
    key: str = ""
    queue: bool = False
    until: float = float("inf")
    running: int = 0
    terms: LimitSettings = LimitSettings()
    broken: bool = False


def first_closed(limits: Iterable[Held]) -> Held | None:
    """The first limit that is closed; without a closed limit the first limit, or None."""
    every = list(limits)
    return next((held for held in every if held.until), every[0] if every else None)


class LimitStats(msgspec.Struct, kw_only=True, frozen=True):
    """A limit in numbers: of a queue, or of a name over all its keys.

    Attributes:
        name: the name of the limit, or of the queue.
        queue: True for the limit of a queue.
        terms: the settings that apply.
        declared: the settings that code declared last.
        by_hand: True when a person set the settings that apply.
        running: the number of places that are taken now.
        failures: for the breaker of a queue, the number of failed attempts in a row.
        until: for a queue, the seconds until a job can start: 0 for now, infinity for never.
        keys: for a name, the number of keys in use.
    """

    name: str
    queue: bool = False
    terms: LimitSettings = LimitSettings()
    declared: LimitSettings | None = None
    by_hand: bool = False
    running: int = 0
    failures: int = 0
    until: float = 0.0
    keys: int = 0


class Setting(Protocol):
    """The settings of a limit as a broker stores them, from code and from people."""

    terms: LimitSettings
    declared: LimitSettings | None
    by_hand: bool


def apply_settings(
    limit: Setting, settings: LimitSettings | None, *, declared: bool
) -> LimitSettings:
    """Store settings that code declares or a person sets; return the old settings.

    Settings of a person take precedence over declarations in code. When a person sets None, the
    latest declaration applies again.
    """
    old = limit.terms
    if declared:
        limit.declared = settings
    else:
        limit.by_hand = settings is not None
    if not (declared and limit.by_hand):
        limit.terms = settings or limit.declared or LimitSettings()
    return old


def tokens(settings: LimitSettings, limiter: Limiter, now: int) -> float:
    """The tokens in the bucket; below 0 after a job that cost more than the bucket had."""
    missing = max(0, limiter.full - now) / settings.every if settings.every else 0.0
    return settings.burst - missing


def opens(
    settings: LimitSettings, limiter: Limiter, running: int, now: int, cost: float = 1.0
) -> int:
    """The time at which a job of this cost may start: 0 for now, ``NEVER`` if not known."""
    when = 0
    if settings.concurrency is not None and running >= settings.concurrency:
        return NEVER
    if settings.breaker is not None and limiter.failures >= settings.breaker[0]:
        when = limiter.until
    if when <= now and running >= _most_running(settings, limiter):
        return NEVER
    if settings.rate is not None:
        if not settings.every:
            return NEVER
        spare = settings.burst - min(cost, settings.burst)
        when = max(when, int(limiter.full - spare * settings.every - _SLACK))
    if settings.window is not None:
        when = max(when, _window_opens(settings.window, limiter, now, cost))
    return when if when > now else 0


def _most_running(settings: LimitSettings, limiter: Limiter) -> int:
    """The most running jobs: the concurrency, and after a failure the bound of the breaker."""
    most = NEVER if settings.concurrency is None else settings.concurrency
    if settings.breaker is not None and limiter.failures:
        most = min(most, max(1, settings.breaker[0] - limiter.failures))
    return most


def _window_opens(window: tuple[float, float], limiter: Limiter, now: int, cost: float) -> int:
    most, length = window[0], int(window[1] * _MICRO)
    if not most:
        return NEVER
    live = [(end + length, count) for end, count in limiter.slots if end + length > now]
    used, need, when = sum(count for _, count in live), min(cost, most), 0
    for leaves, count in live:
        if used + need <= most:
            break
        used, when = used - count, leaves
    return when


def room(settings: LimitSettings, limiter: Limiter, running: int, now: int, most: int) -> int:
    """The number of jobs of cost 1 that may start now, ``most`` at most."""
    if settings.breaker is not None and opens(settings, limiter, running, now):
        return 0
    free: float = min(most, _most_running(settings, limiter) - running)
    if settings.rate is not None:
        every = settings.every
        if not every:
            return 0
        spare = settings.burst * every
        free = min(free, (spare - max(0, limiter.full - now) + _SLACK) / every)
    if settings.window is not None:
        length = int(settings.window[1] * _MICRO)
        used = sum(n for end, n in limiter.slots if end + length > now)
        free = min(free, settings.window[0] - used)
    if free < 1 <= most:  # ``free`` may be just below 1 by rounding, so ``opens`` decides
        return 0 if opens(settings, limiter, running, now) else 1
    return max(0, int(free))


def take(settings: LimitSettings, limiter: Limiter, now: int, cost: float = 1.0) -> None:
    """Start a job of this cost, or several jobs of this total cost."""
    if settings.every:
        limiter.full = max(limiter.full, now) + cost * settings.every
    if settings.window is not None and cost:
        length = int(settings.window[1] * _MICRO)
        width = max(1, length // _SLOTS)
        slots = [slot for slot in limiter.slots if slot[0] + length > now]
        end = (now // width + 1) * width
        if slots and slots[-1][0] >= end:
            slots[-1] = slots[-1][0], slots[-1][1] + cost
        else:
            slots.append((end, cost))
        limiter.slots = slots


def give_back(settings: LimitSettings, limiter: Limiter, taken: int, cost: float = 1.0) -> None:
    """Refund a job that was leased at the time ``taken`` and has not run.

    The cost is subtracted from the slot of the time ``taken``. Subtracting it from a later slot
    would let too many jobs start.
    """
    limiter.full -= cost * settings.every
    if settings.window is None:
        return
    width = max(1, int(settings.window[1] * _MICRO) // _SLOTS)
    for number, (end, count) in enumerate(limiter.slots):
        if end > taken:
            if end - width <= taken:
                limiter.slots[number] = end, max(0.0, count - cost)
            return


def ended(settings: LimitSettings, limiter: Limiter, now: int, *, well: bool) -> None:
    """Count the result of an attempt for the breaker."""
    if settings.breaker is not None:
        limiter.failures = 0 if well else limiter.failures + 1
        if limiter.failures >= settings.breaker[0]:
            limiter.until = now + int(settings.breaker[1] * _MICRO)


def change(old: LimitSettings, new: LimitSettings, limiter: Limiter, now: int) -> None:
    """Convert the state to new settings. Tokens that the new bucket cannot hold are lost."""
    if limiter.full <= now or new.rate is None:
        limiter.full = 0.0
    elif new.every and old.every:
        left = min(new.burst, tokens(old, limiter, now))
        limiter.full = now + (new.burst - left) * new.every
    elif new.every:
        limiter.full = min(limiter.full, now + new.burst * new.every)
    if new.window is None:
        limiter.slots = []
    if new.breaker is None:
        limiter.failures = 0


def clear_at(settings: LimitSettings, limiter: Limiter) -> int:
    """The time at which an unused limiter equals a new limiter."""
    last = 0
    if limiter.slots and settings.window:
        last = limiter.slots[-1][0] + int(settings.window[1] * _MICRO)
    return max(int(limiter.full) + 1 if limiter.full else 0, last)
