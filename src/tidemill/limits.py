"""Limits as users write them: rates, windows, concurrency, breakers; and changing them.

What they mean is in :mod:`tidemill.gate`; that they hold over all workers is the broker's doing.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from tidemill.brokers.base import Feature
from tidemill.brokers.limiting import limiting
from tidemill.config import (
    MAX_SECONDS,
    Seconds,
    check_count,
    check_known,
    check_name,
    check_seconds,
)
from tidemill.errors import InvalidOption
from tidemill.gate import Claim, LimitStats, Terms
from tidemill.job import Ref

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = [
    "TERMS",
    "Breaker",
    "Limit",
    "Limits",
    "QueueSettings",
    "check_limit",
    "limit_public",
    "rate_text",
    "terms_from",
    "terms_text",
]

_RATE = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)?([smhd])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST = 1e9

TERMS = ("rate", "burst", "window", "concurrency", "breaker")
"""The options that make the terms of a limit; ``breaker`` is for queues alone."""


@dataclasses.dataclass(frozen=True)
class Breaker:
    """Stop starting jobs of a queue that keep failing.

    Attributes:
        failures: attempts that failed one after the other, of whatever jobs of the queue. A
            success begins the count anew; an attempt that was cancelled or given back is no matter.
        pause: seconds for which nothing is started then. After it one job at a time is tried, until
            one succeeds; each that fails begins another pause.
    """

    failures: int = 5
    pause: Seconds = 30.0

    def __post_init__(self) -> None:
        check_count("failures of a breaker", self.failures, 1)


@dataclasses.dataclass(frozen=True)
class Limit:
    """How many jobs may start, over all workers: ``@mill.task(limit=Limit("10/s", …))``.

    Attributes:
        rate: as ``"10/s"``, ``"100/m"``, ``"5000/h"``, ``"1/d"`` or ``"10/30s"``: a bucket that
            gets so many tokens in that time; a job takes one when it starts. ``"0/s"`` starts none.
        burst: tokens the bucket holds at most; those of one second, at least 1, when not given.
        window: also as ``"100/m"``: never more than that start within any such time.
        concurrency: jobs that run at a time.
        key: who a job is for: text, or a function of the task's arguments. Each key has the limit
            for itself, and keys take turns, so that one with many jobs does not hold up the others.
            A limit may be nothing but a key.
        cost: tokens a job takes, or a function of the task's arguments that says how many. One
            that costs more than the bucket holds waits until it is full.
        name: limits of one name are one; the task's name, or a queue's for messages, if not given.

    Raises:
        InvalidOption: a value cannot be used, or the limit would not limit anything.
    """

    rate: str | None = None
    burst: float | None = None
    window: str | None = None
    concurrency: int | None = None
    key: str | Callable[..., object] | None = None
    cost: float | Callable[..., float] = 1.0
    name: str | None = None
    terms: Terms = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in TERMS if name != "breaker"}
        object.__setattr__(self, "terms", terms_from(given))
        if self.terms == Terms() and self.key is None:
            raise InvalidOption("a limit needs a rate, a window, a concurrency or a key")
        if isinstance(self.key, str):
            check_name("key of a limit", self.key)
        if not callable(self.cost):
            _check_number("cost", self.cost, 0)
        if self.name is not None:
            check_name("name of a limit", self.name)

    def claim(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Claim:
        """What the envelope of a job with these arguments says; ``name`` is for a limit of none.

        Raises:
            InvalidOption: its key or its cost comes out as what cannot be used.
        """
        key = self.key
        if callable(key):
            value = key(*args, **kwargs)
            key = check_name("key of a limit", value if isinstance(value, str) else str(value))
        cost = self.cost(*args, **kwargs) if callable(self.cost) else self.cost
        if callable(self.cost):
            _check_number("cost", cost, 0)
        return Claim(self.name or name, key or "", float(cost), self.terms)


class QueueSettings(TypedDict, total=False):
    """What :meth:`Tidemill.queue` may set; units as in :class:`Limit` and :class:`Breaker`."""

    max_size: int | None
    rate: str | None
    burst: float | None
    window: str | None
    concurrency: int | None
    breaker: Breaker | int | None


class Limits:
    """The limits of a store: ``mill.limits``."""

    def __init__(self, mill: Tidemill) -> None:
        self._mill = mill
        self._queues: dict[str, dict[str, Any]] = {}  # what this app has said of each

    def list(self) -> list[LimitStats]:
        """Every limit in numbers, those of queues first, then by name."""
        return limiting(self._mill.broker, "limits").limits()

    def set(self, name: str, **changes: Any) -> None:
        """Change a limit by its name, which is the task's if it has none of its own.

        Options as of :class:`Limit`: ``rate burst window concurrency``. What is not given stays;
        None lifts that part. It holds at once, for all workers, whatever code declares, until
        somebody changes it again or has the code's hold: :meth:`reset`.
        """
        check_known("a limit", changes, [term for term in TERMS if term != "breaker"])
        self._change(check_name("name of a limit", name), changes, queue=False)

    def set_queue(self, name: str, **changes: Any) -> None:
        """Change the limit of a queue, likewise; it may have a ``breaker``, too."""
        check_known("the limit of a queue", changes, TERMS)
        self._change(check_name("queue", name), changes, queue=True)

    def reset(self, name: str) -> None:
        """Have a limit be what code declared last, and what it declares from now on."""
        check_name("name of a limit", name)
        limiting(self._mill.broker, "a limit").set_limit(name, None)

    def reset_queue(self, name: str) -> None:
        """The same for the limit of a queue."""
        check_name("queue", name)
        limiting(self._mill.broker, "a limit").set_limit(name, None, queue=True)

    def declare_queue(self, name: str, settings: Mapping[str, Any]) -> None:
        """Have a queue's limit be as code says, unless somebody set it by hand."""
        said = {**self._queues.get(name, {}), **settings}
        terms = terms_from(said)
        self._queues[name] = said
        option = f"{next(iter(settings))}="
        self._mill.features.need(Feature.LIMITS, option)
        limiting(self._mill.broker, option).set_limit(name, terms, queue=True, declared=True)

    def _change(self, name: str, changes: Mapping[str, Any], *, queue: bool) -> None:
        if not changes:
            raise InvalidOption(f"say what of the limit {name!r} is to change: {', '.join(TERMS)}")
        broker = limiting(self._mill.broker, "a limit")
        rows = [row for row in broker.limits() if (row.name, row.queue) == (name, queue)]
        old = rows[0].terms if rows else Terms()
        broker.set_limit(name, terms_from(changes, old), queue=queue)

    def check_shared(self, task: str, limit: Limit | None) -> None:
        """Refuse a task's limit that another task of the app declares otherwise.

        Raises:
            InvalidOption: which of the two holds would change with every job.
        """
        if limit is None:
            return
        name = limit.name or task
        for other in list(self._mill.tasks.values()):
            theirs = other.options.limit
            if theirs is None or other.name == task or (theirs.name or other.name) != name:
                continue
            if theirs.terms != limit.terms:
                raise InvalidOption(
                    f"the limit {name!r} of task {task!r} is declared otherwise by task "
                    f"{other.name!r}; share one Limit, or give one of them another name="
                )

    def claim(
        self, limit: Limit, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Claim:
        """The claim of a job that is about to be put.

        Raises:
            InvalidOption: its key or its cost cannot be said, or cannot be used.
        """
        computed = callable(limit.key) or callable(limit.cost)
        if computed and _holds_ref([*args, *kwargs.values()]):
            what = "key" if callable(limit.key) else "cost"
            raise InvalidOption(
                f"the {what} of the limit of {name!r} is a function of the arguments, and those "
                "that come from a job before it are not known yet; give a fixed one with using(…)"
            )
        if not self._mill.sync:
            limiting(self._mill.broker, "limit=")
        return limit.claim(name, args, kwargs)


# -- reading -------------------------------------------------------------------------------------


def check_limit(value: object) -> Limit:
    """A limit, or a rate as text."""
    if isinstance(value, Limit):
        return value
    if isinstance(value, str):
        check_rate("limit", value)
        return Limit(rate=value)
    raise InvalidOption(f'limit must be a rate as "10/s", or a Limit, not {value!r}')


def check_rate(field: str, value: object) -> tuple[float, float]:
    """(jobs, seconds) of a rate as text."""
    found = _RATE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise InvalidOption(
            f'{field} must be jobs per time, as "10/s", "100/m", "5000/h", "1/d" or "10/30s", '
            f"not {value!r}"
        )
    jobs, seconds = float(found[1]), float(found[2] or 1) * _UNITS[found[3]]
    if jobs > _MOST or not 0 < seconds <= MAX_SECONDS:
        raise InvalidOption(
            f"{field} {value!r} is out of bounds: at most {_MOST:,.0f} jobs, in a time above 0"
        )
    return jobs, seconds


def terms_from(given: Mapping[str, Any], old: Terms = Terms()) -> Terms:  # noqa: B008 - frozen
    """Terms with what is given changed: ``TERMS`` by name; None lifts one.

    Raises:
        InvalidOption: a value cannot be used; the sentence names the option.
    """
    rate, burst, window, concurrency = old.rate, old.burst, old.window, old.concurrency
    breaker = old.breaker
    if "rate" in given:
        rate = None if given["rate"] is None else check_rate("rate", given["rate"])
    if given.get("burst") is not None:
        if rate is None:
            raise InvalidOption("burst goes with a rate; give rate= with it")
        burst = _check_number("burst", given["burst"], 1)
    elif "burst" in given or rate is None or burst == _own_burst(old.rate):
        burst = _own_burst(rate)
    if "window" in given:
        window = None if given["window"] is None else _check_window(given["window"])
    if "concurrency" in given:
        concurrency = given["concurrency"]
        if concurrency is not None:
            check_count("concurrency", concurrency)
    if "breaker" in given:
        breaker = None if given["breaker"] is None else _check_breaker(given["breaker"])
    return Terms(rate, burst, window, concurrency, breaker)


def _own_burst(rate: tuple[float, float] | None) -> float:
    """The burst of a rate for which none is given: what comes in a second."""
    return max(1.0, rate[0] / rate[1]) if rate else 1.0


def _check_number(field: str, value: object, least: float) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # ``number`` says what mypy cannot see: that it can be made a float.
    if not number or not least <= float(value) <= _MOST:  # type: ignore[arg-type]
        raise InvalidOption(
            f"{field} must be a number from {least:g} to {_MOST:,.0f}, not {value!r}"
        )
    return float(value)  # type: ignore[arg-type]


def _check_window(value: object) -> tuple[float, float]:
    window = check_rate("window", value)
    if window[0] < 1 or window[0] != math.floor(window[0]):
        raise InvalidOption(f"window must allow a whole number of jobs, 1 or more, not {value!r}")
    return window


def _check_breaker(value: object) -> tuple[int, float]:
    # What is no number is refused by the next line.
    breaker = value if isinstance(value, Breaker) else Breaker(value)  # type: ignore[arg-type]
    return breaker.failures, check_seconds("pause of a breaker", breaker.pause)


def _holds_ref(value: object) -> bool:
    """True when something of it is known only when another job has ended."""
    if isinstance(value, (list, tuple)):
        return any(_holds_ref(item) for item in value)
    return isinstance(value, Ref)


# -- showing -------------------------------------------------------------------------------------


def rate_text(rate: tuple[float, float]) -> str:
    """A rate as a user would write it."""
    jobs, seconds = rate
    for unit, size in reversed(_UNITS.items()):
        if seconds % size == 0:
            count = seconds / size
            return f"{jobs:g}/{'' if count == 1 else f'{count:g}'}{unit}"
    return f"{jobs:g}/{seconds:g}s"


def terms_text(terms: Terms) -> str:
    """Terms in a few words; empty when nothing is limited."""
    parts = []
    if terms.rate is not None:
        parts.append(f"{rate_text(terms.rate)}, burst {terms.burst:g}")
    if terms.window is not None:
        parts.append(f"at most {rate_text(terms.window)}")
    if terms.concurrency is not None:
        parts.append(f"{terms.concurrency} at a time")
    if terms.breaker is not None:
        parts.append(f"breaker {terms.breaker[0]} failures, {terms.breaker[1]:g} s")
    return ", ".join(parts)


def limit_public(row: LimitStats) -> dict[str, Any]:
    """A limit in numbers as plain data for programs."""
    terms = row.terms
    return {
        "name": row.name,
        "queue": row.queue,
        "rate": rate_text(terms.rate) if terms.rate else None,
        "burst": terms.burst if terms.rate else None,
        "window": rate_text(terms.window) if terms.window else None,
        "concurrency": terms.concurrency,
        "breaker": msgspec.to_builtins(Breaker(*terms.breaker)) if terms.breaker else None,
        "by_hand": row.by_hand,
        "running": row.running,
        "failures": row.failures,
        "keys": row.keys,
        "opens_in": row.until if row.until < float("inf") else None,
    }
