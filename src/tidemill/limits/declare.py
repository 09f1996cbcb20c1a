"""Limits as users write them: rates, windows, concurrency and breakers.

The arithmetic is in :mod:`tidemill.limits.arithmetic`. The broker enforces limits over all workers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, TypedDict, TypeVar

import msgspec

from tidemill.core.config import MAX_SECONDS, Seconds, check_count, check_name, check_seconds
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.errors import InvalidOption
from tidemill.limits.arithmetic import LimitStats

_RATE = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)?([smhd])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST = 1e9

V = TypeVar("V")
FunctionOfArguments = Callable[Concatenate[Any, ...], V] | Callable[..., V]
"""A function of a task's arguments. The first form lets type checkers type a lambda's parameter."""


class LimitChanges(TypedDict, total=False):
    """The settings of a limit, as in :class:`Limit`. None removes a setting."""

    rate: str | None
    burst: float | None
    window: str | None
    concurrency: int | None


class QueueLimitChanges(LimitChanges, total=False):
    """The settings of a queue's limit, as in :class:`Limit` and :class:`Breaker`."""

    breaker: Breaker | int | None


class QueueSettings(QueueLimitChanges, total=False):
    """The options of :meth:`Tidemill.queue`: the queue's limit settings, and ``max_size``."""

    max_size: int | None


LIMIT_TERMS = tuple(LimitChanges.__annotations__)
TERMS = tuple(QueueLimitChanges.__annotations__)
QUEUE_SETTINGS = tuple(QueueSettings.__annotations__)


@dataclasses.dataclass(frozen=True)
class Breaker:
    """Start no jobs of a queue whose jobs keep failing.

    Attributes:
        failures: the number of failed attempts in a row, of any jobs, that stops the queue. A
            success restarts the count. An attempt that was cancelled or given back does not count.
        pause: seconds in which no job starts. Then jobs run one at a time until a job succeeds;
            each failure begins another pause.

    Raises:
        InvalidOption: ``failures`` is no whole number from 1.
    """

    failures: int = 5
    pause: Seconds = 30.0

    def __post_init__(self) -> None:
        check_count("failures of a breaker", self.failures, 1)


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit on job starts over all workers: ``@mill.task(limit=Limit("10/s", …))``.

    Attributes:
        rate: a text such as ``"10/s"``, ``"100/m"``, ``"5000/h"``, ``"1/d"`` or ``"10/30s"``: a
            bucket gets this number of tokens in this time. A starting job takes a token. With
            ``"0/s"`` no job starts.
        burst: the most tokens in the bucket; by default the tokens of one second, at least 1.
        window: a text such as ``"100/m"``: the most jobs that start in any span of this length.
        concurrency: the most jobs that run at a time.
        key: the partition of a job, such as a customer: text, or a function of the task's
            arguments. Each key has its own count against the limit. Keys take turns, so that a key
            with many jobs does not delay the others. A limit may consist of only a key.
        cost: the tokens that a job takes, or a function of the task's arguments. A job that costs
            more than the bucket holds waits until the bucket is full.
        name: limits with the same name are one limit. By default, this is the name of the task, or
            the name of the queue for a message.

    Raises:
        InvalidOption: a value cannot be used, or the limit would not limit anything.
    """

    rate: str | None = None
    burst: float | None = None
    window: str | None = None
    concurrency: int | None = None
    key: str | FunctionOfArguments[object] | None = None
    cost: float | FunctionOfArguments[float] = 1.0
    name: str | None = None
    terms: LimitSettings = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in LIMIT_TERMS}
        object.__setattr__(self, "terms", terms_from(given))
        if self.terms == LimitSettings() and self.key is None:
            raise InvalidOption("a limit needs a rate, a window, a concurrency or a key")
        if isinstance(self.key, str):
            check_name("key of a limit", self.key)
        if not callable(self.cost):
            _check_number("cost", self.cost, 0)
        if self.name is not None:
            check_name("name of a limit", self.name)

    def claim(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JobLimit:
        """The limit in the envelope of a job with these arguments; ``name`` is the default name.

        Raises:
            InvalidOption: the key or the cost has a value that cannot be used.
        """
        key = self.key
        if callable(key):
            value = key(*args, **kwargs)
            key = check_name("key of a limit", value if isinstance(value, str) else str(value))
        cost = self.cost(*args, **kwargs) if callable(self.cost) else self.cost
        if callable(self.cost):
            _check_number("cost", cost, 0)
        return JobLimit(self.name or name, key or "", float(cost), self.terms)


def check_limit(value: object) -> Limit:
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


def terms_from(given: Mapping[str, Any], old: LimitSettings = LimitSettings()) -> LimitSettings:  # noqa: B008 - frozen
    """Limit settings with changes: ``TERMS`` by name; None removes a setting.

    Raises:
        InvalidOption: a value cannot be used; the message names the option.
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
    return LimitSettings(rate, burst, window, concurrency, breaker)


def _own_burst(rate: tuple[float, float] | None) -> float:
    """The default burst of a rate: the tokens of one second."""
    return max(1.0, rate[0] / rate[1]) if rate else 1.0


def _check_number(field: str, value: object, least: float) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # mypy cannot see that float accepts the value when ``number`` is true.
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
    # Breaker refuses a value that is no number.
    breaker = value if isinstance(value, Breaker) else Breaker(value)  # type: ignore[arg-type]
    return breaker.failures, check_seconds("pause of a breaker", breaker.pause)


def value_of(setting: str, text: str, pause: float = 30.0) -> Any:
    """The value of a setting that a user has written as text; ``pause`` is for a breaker.

    Raises:
        InvalidOption: the text is no such value.
    """
    try:
        if setting == "burst":
            return float(text)
        if setting == "breaker":
            return Breaker(int(text), pause)
        return int(text) if setting == "concurrency" else text
    except ValueError:
        what = "a number" if setting == "burst" else "a whole number"
        raise InvalidOption(f"{setting} must be {what} or none, not {text[:20]!r}") from None


def rate_text(rate: tuple[float, float]) -> str:
    jobs, seconds = rate
    for unit, size in reversed(_UNITS.items()):
        if seconds % size == 0:
            count = seconds / size
            return f"{jobs:g}/{'' if count == 1 else f'{count:g}'}{unit}"
    return f"{jobs:g}/{seconds:g}s"


def terms_text(terms: LimitSettings) -> str:
    """Limit settings in a few words; empty when nothing is limited."""
    parts = []
    if terms.rate is not None:
        parts.append(f"{rate_text(terms.rate)}, burst {terms.burst:g}")
    if terms.window is not None:
        parts.append(f"at most {rate_text(terms.window)}")
    if terms.concurrency is not None:
        parts.append(f"{terms.concurrency} at a time")
    if terms.breaker is not None:
        parts.append(f"breaker: {terms.breaker[1]:g} s after {terms.breaker[0]} failures")
    return ", ".join(parts)


def limit_public(row: LimitStats) -> dict[str, Any]:
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
        "starts_in": row.until if row.until < float("inf") else None,
    }
