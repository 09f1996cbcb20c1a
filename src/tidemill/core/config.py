"""Check user input: options, names, durations, URLs. Each error is one sentence."""

from __future__ import annotations

import datetime as dt
import math
import os
import re
import sys
import urllib.parse
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tidemill.core.envelope import rank_of
from tidemill.core.job import Conflict
from tidemill.core.retry import Retries, RetryPolicy
from tidemill.core.suggest import did_you_mean, hint, our_option
from tidemill.errors import InvalidOption

MAX_NAME = 200  # the most bytes of an id, queue, key or task (an LMDB key has at most 511 bytes)
MAX_SECONDS = 100 * 365 * 86400.0  # a hundred years: a longer duration is a mistake of units
LATEST = 2.0**37  # epoch seconds, in the year 6325: a later time is a mistake of units

Seconds = float | int | dt.timedelta | str
"""A duration: seconds, a timedelta, or a text such as ``"5 minutes"``."""

ELAPSED = {"second": 1.0, "minute": 60.0, "hour": 3600.0}
_UNITS = ELAPSED | {"day": 86_400.0, "week": 604_800.0}
_STEP = re.compile(r"\s*(\d+(?:\.\d+)?)?\s*([a-z]+?)s?\s*", re.ASCII)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # repr may run a user's code; an int of 5,000 digits has no repr
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def check_name(field: str, value: object) -> str:
    """An id, queue, key or task name: 1 to 200 bytes of UTF-8, no control characters."""
    if not isinstance(value, str):
        raise InvalidOption(f"{field} must be a string, not {type(value).__name__}")
    if not value or value.isspace():
        raise InvalidOption(f"{field} must not be {'blank' if value else 'empty'}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidOption(f"{field} {_shown(value)} is not valid text") from None
    if size > MAX_NAME:
        raise InvalidOption(f"{field} has {size} bytes; {MAX_NAME} is the most")
    if not value.isprintable():
        raise InvalidOption(f"{field} {_shown(value)} contains a control or invisible character")
    return value


def check_seconds(field: str, value: object) -> float:
    """A duration: seconds, a timedelta or a text; 0 or more, at most a hundred years."""
    if isinstance(value, dt.timedelta):
        value = value.total_seconds()
    elif isinstance(value, str):
        value = _seconds_of(field, value)
    if isinstance(value, dt.datetime):
        other = "give the moment as at=" if field == "delay" else "pass the seconds from now on"
        raise InvalidOption(f"{field} must be seconds or a timedelta, not a datetime; {other}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidOption(
            f"{field} must be seconds, a timedelta or a text as '5 minutes', not {_shown(value)}"
        )
    if not value >= 0 or value == math.inf:  # ``not value >= 0`` is also true for NaN
        raise InvalidOption(f"{field} must be 0 or more seconds, not {_shown(value)}")
    if value > MAX_SECONDS:
        raise InvalidOption(f"{field} is more than a hundred years; it is given in seconds")
    return float(value)


def number_or_text(text: str) -> float | str:
    """The number that a text is; else the text itself."""
    try:
        return float(text)
    except ValueError:
        return text


def count_and_unit(text: str) -> tuple[str, str]:
    """The number and the unit of a text such as ``5 minutes`` or ``day``; either may be empty."""
    found = _STEP.fullmatch(text)
    return (found[1] or "", found[2]) if found else ("", "")


def _seconds_of(field: str, text: str) -> float:
    count, unit = count_and_unit(text)
    if unit not in _UNITS:
        raise InvalidOption(
            f"{field} {_shown(text)} is no duration; write seconds, minutes, hours, days or weeks, "
            "as '5 minutes', or give seconds as a number"
        )
    return float(count or 1) * _UNITS[unit]


def check_moment(field: str, value: object) -> float:
    """A time from 1970 to 6325: an aware datetime or epoch seconds. Returns epoch seconds."""
    if isinstance(value, dt.datetime):
        if value.tzinfo is None:
            raise InvalidOption(
                f"{field} is a datetime without a time zone; give it one, "
                "for example datetime.now(timezone.utc)"
            )
        if not 0 < value.timestamp() < LATEST:
            raise InvalidOption(f"{field} must be after 1970 and before 6325, not {value}")
        return value.timestamp()
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < LATEST:
        raise InvalidOption(
            f"{field} must be an aware datetime or epoch seconds, not {_shown(value)}"
        )
    return float(value)


def check_priority(value: object) -> int:
    """A priority of -100 to 100, higher first. Returns the stored rank."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
        raise InvalidOption(f"priority must be a number from -100 to 100, not {_shown(value)}")
    return rank_of(value)


def check_alter(priority: object, queue: object) -> tuple[int | None, str | None]:
    """The new rank and the new queue of a job; None for no change."""
    if priority is None and queue is None:
        raise InvalidOption("alter needs another priority, another queue, or both")
    rank = None if priority is None else check_priority(priority)
    return rank, None if queue is None else check_name("queue", queue)


def check_count(field: str, value: object, least: int = 0, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidOption(
            f"{field} must be a whole number from {least} to {most}, not {_shown(value)}"
        )
    return value


def check_retries(value: object, old: RetryPolicy = RetryPolicy()) -> RetryPolicy:  # noqa: B008 - frozen
    """The stored numbers of an option ``retries``. A number keeps the delays of ``old``."""
    if isinstance(value, Retries):
        check_count("retries", value.limit, 0, 65_000)
        delay = check_seconds("delay of retries", value.delay)
        cap = check_seconds("cap of retries", value.cap)
        check_count("immediate of retries", value.immediate, 0, 65_000)
        if not isinstance(value.jitter, bool):
            raise InvalidOption(
                f"jitter of retries must be True or False, not {_shown(value.jitter)}"
            )
        if not isinstance(value.factor, (int, float)) or not 1 <= value.factor <= 1000:
            raise InvalidOption(
                f"factor of retries must be from 1 to 1000, not {_shown(value.factor)}"
            )
        return msgspec.structs.replace(value.policy, delay=delay, cap=cap)
    limit = check_count("retries", value, 0, 65_000)
    return msgspec.structs.replace(old, limit=limit)


def check_conflict(value: object) -> str:
    """A value of ``on_conflict``: one of the four ways to treat a second job with the same key."""
    try:
        return Conflict(str(value)).value
    except ValueError:
        choices, near = ", ".join(Conflict), did_you_mean(_shown(value).strip("'"), Conflict)
        raise InvalidOption(
            f"on_conflict must be one of {choices}, not {_shown(value)}{near and f'; {near}'}"
        ) from None


def check_app(
    url: object, env: object, serializer: object, secret_keys: object, allow_imports: object
) -> None:
    """Check the options of a Tidemill, each alone and all together."""
    if serializer not in ("msgpack", "pickle"):
        raise InvalidOption(f"serializer must be msgpack or pickle, not {serializer!r}")
    if isinstance(secret_keys, (str, bytes)) or not isinstance(secret_keys, Iterable):
        raise InvalidOption("secret_keys must be a list of keys, newest first")
    if not all(isinstance(key, (str, bytes)) and key for key in secret_keys):
        raise InvalidOption("secret_keys must be non-empty strings or bytes")
    if serializer == "pickle" and not secret_keys:
        raise InvalidOption("serializer='pickle' runs code from the jobs; it needs secret_keys")
    if isinstance(allow_imports, str):
        raise InvalidOption("allow_imports must be a list of patterns, as ['math.*']")
    if url is not None and env is not None:
        raise InvalidOption("give either url or env, not both")


def check_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a misspelt option and name the nearest one."""
    known = sorted(known)
    for name in given:
        if name not in known:
            raise InvalidOption(f"unknown option {name!r} of {what}; {_hint(name, known)}")


def _hint(name: str, known: list[str]) -> str:
    ours = our_option(name)
    return f"write {ours}" if ours else hint(name, known)


def storable(text: str) -> str:
    """Text without lone surrogates, which UTF-8 cannot encode: they become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class Url(msgspec.Struct, frozen=True):
    """The parts of a broker URL. ``path`` is a file-system path for ``lmdb``."""

    text: str
    scheme: str
    path: str
    options: dict[str, str]


def parse_url(text: str) -> Url:
    """Split a broker URL; ``postgres://`` becomes ``postgresql://``. Raises InvalidOption."""
    if not isinstance(text, str) or "://" not in text:
        raise InvalidOption(
            f"url {text!r} is not a broker URL such as lmdb://./jobs or redis://localhost"
        )
    scheme, rest = text.split("://", 1)
    if scheme.lower() == "postgres":  # another name of ``postgresql``, as in libpq
        scheme, text = "postgresql", f"postgresql://{rest}"
    rest, _, query = rest.partition("?")
    try:
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise InvalidOption(f"the part after ? in url {text!r} is not name=value&…") from None
    path = os.fsdecode(urllib.parse.unquote_to_bytes(rest))
    return Url(text, scheme.lower(), path, dict(pairs))


def lmdb_url(folder: str | Path) -> str:
    return f"lmdb://{urllib.parse.quote(os.fsencode(folder))}"


def url_from_environment() -> str | None:
    return os.environ.get("TIDEMILL_URL") or None


def default_url() -> str:
    """``$TIDEMILL_URL``, else LMDB in ``.tidemill`` of the nearest project folder, or here."""
    url = url_from_environment()
    if url:
        return url
    here = Path.cwd()
    root = next(
        (
            d
            for d in (here, *here.parents)
            if (d / "pyproject.toml").is_file() or (d / ".git").exists()
        ),
        here,
    )
    return lmdb_url(root / ".tidemill")


def main_module() -> str | None:
    """The name under which a worker imports the running script."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name: str = spec.name
        return name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else None
