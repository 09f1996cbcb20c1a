"""The translation of Django's database errors into ours."""

from __future__ import annotations

from tidemill.brokers.django.dialects import Dialect
from tidemill.errors import BrokerUnavailable, StoreBusy, StoreFull, TidemillError


class Locked(StoreBusy):
    """Another transaction held a lock for too long: the statement has done nothing."""


def translated(alias: str, dialect: Dialect, error: Exception) -> TidemillError:
    """The error that the user sees, for an error of Django."""
    from django.db import InterfaceError, OperationalError

    if (no_room := full(alias, dialect, error)) is not None:
        return no_room
    if dialect.is_locked(error.__cause__ or error):
        return Locked(f"database {alias!r} is not available: another transaction holds a lock")
    text = str(error).strip() or type(error).__name__
    is_away = isinstance(error, (OperationalError, InterfaceError))
    lacks = ("no such table", "doesn't exist") if is_away else ("no such table", "exist")
    if "tidemill_" in text and any(words in text for words in lacks):
        return TidemillError(
            f"database {alias!r} lacks the tables of tidemill; add 'tidemill.django' to "
            f"INSTALLED_APPS and run: manage.py migrate --database {alias}"
        )
    if is_away:
        return BrokerUnavailable(f"database {alias!r} is not available: {text}")
    return TidemillError(f"database {alias!r} refused a statement of django://: {text}")


def full(alias: str, dialect: Dialect, error: Exception) -> StoreFull | None:
    """The error of a full disk, for an error of Django that reports a full disk; else None."""
    cause = error.__cause__ or error
    if not dialect.is_full(cause):
        return None
    text = str(cause.args[-1] if cause.args else cause).strip().partition("\n")[0]
    return StoreFull(f"database {alias!r} has no room left ({text}); make room on its disk")
