"""Translates errors of the server and the driver; each message says what to do."""

from __future__ import annotations

import psycopg

from tidemill.brokers.contract.dependencies import not_waiting
from tidemill.errors import (
    BrokerUnavailable,
    DuplicateJob,
    QueueFull,
    StoreFull,
    StoreMoved,
    TidemillError,
)


class Refused(BrokerUnavailable):
    """The server is up and refuses the login, so waiting does not help."""


class Renumbered(Refused):
    """The server has lost queues that this process knew, and has given them other numbers."""


class Unfit(BrokerUnavailable):
    """This code cannot use the store, which is gone or has another version."""


class Stalled(psycopg.OperationalError):
    """The server did not answer in time; it may have done the call."""


class SerializationConflict(TidemillError, psycopg.errors.SerializationFailure):
    """A transaction under REPEATABLE READ or SERIALIZABLE must be repeated from its start."""


NOT_MIGRATED = "run: tidemill migrate URL"  # the advice for tables that are missing or old

_REFUSED = {
    "28P01": "the password is wrong; check the url",
    "28000": "it does not let this user in; check the user in the url and pg_hba.conf",
    "3D000": "there is no such database; create it, or name another in the url",
    "53300": "it has no connection left; raise its max_connections, or lower pool= in the url",
    "25006": "it is read-only, as a standby is; name the primary, "
    "or several hosts and target_session_attrs=read-write",
    "42501": "this user lacks a right ({}); run the SQL that `tidemill migrate URL --grants ROLE` "
    "prints, as the user that migrates",
}
_GIVEN_UP = {
    "55P03": "a transaction that stays open holds a lock that this call needs; end the transaction "
    "(pg_stat_activity shows it), or raise patience= in the url",
    "57014": "the call was cancelled, by somebody or by the statement_timeout of this user",
}
_FOR_GOOD = ("28P01", "28000", "3D000", "42501")
_UNMIGRATED = ("3F000", "42P01", "42883", "42704", "42703", "42804", "42809", "42846")
_FULL = ("53100", "53200", "54000", "53400")


def is_lost(error: psycopg.Error, conn: psycopg.Connection | None) -> bool:
    """True when the connection is gone, so that a reply may be lost."""
    if conn is None or conn.closed or conn.broken:
        return True
    state = error.sqlstate or ""
    return state[:2] == "08" or state in ("57P01", "57P02", "57P03", "57P05")


def is_unsure(error: psycopg.Error, conn: psycopg.Connection | None) -> bool:
    """True when the call may have committed, although it reports an error."""
    return is_lost(error, conn) or error.sqlstate in _GIVEN_UP


def is_worth_repeating(error: psycopg.Error) -> bool:
    """True when the server rolled the call back because of another call."""
    # Also true when a migration replaced the functions during the call.
    if error.sqlstate == "XX000":
        return "cache lookup failed for function" in str(error)
    return error.sqlstate in ("40001", "40P01")


def translated(error: psycopg.Error, where: str) -> TidemillError:
    if isinstance(error, Stalled):
        return BrokerUnavailable(
            f"PostgreSQL at {where} did not answer within patience; look whether it is overloaded, "
            "or whether a transaction that stays open holds its locks (pg_stat_activity)"
        )
    state, diag = error.sqlstate or "", error.diag
    if state == "TM001":
        return _duplicate(diag)
    if state == "TM002":
        name, most = diag.message_detail, diag.message_primary
        return QueueFull(f"queue {name!r} holds max_size={most} jobs already")
    if state == "TM004":
        return not_waiting(diag.message_detail or "")
    if state == "TM003":
        return StoreMoved(f"this store moves to {diag.message_detail}; use that url")
    # The jobs were committed. A full NOTIFY queue then fails the commit of the notifications.
    if state == "TM005" or (state == "54000" and "NOTIFY" in _message(error)):
        return BrokerUnavailable(f"PostgreSQL at {where} broke off: {_message(error)}")
    if state in _FULL:
        return StoreFull(
            f"PostgreSQL at {where} has no room left ({_message(error)}); make room on its disk"
        )
    if state in _UNMIGRATED:
        return Unfit(
            f"the store at {where} does not fit this version of tidemill ({_message(error)}); "
            f"upgrade tidemill here if the store is newer, else {NOT_MIGRATED}"
        )
    if state in _GIVEN_UP:
        return BrokerUnavailable(f"PostgreSQL at {where} gave up: {_GIVEN_UP[state]}")
    state = state if state in _REFUSED else _guess(error)
    if state:
        kind = Refused if state in _FOR_GOOD else BrokerUnavailable
        text = _REFUSED[state].format(_message(error))
        return kind(f"PostgreSQL at {where} refuses: {text}")
    state = error.sqlstate or ""
    if state and state[:2] not in ("08", "57"):
        return TidemillError(f"PostgreSQL at {where} says: {_message(error)} ({state})")
    return BrokerUnavailable(
        f"cannot reach PostgreSQL at {where}: {_message(error)}; start it, or correct the url"
    )


def conflict(error: psycopg.Error) -> SerializationConflict | None:
    """Return the conflict of a caller's transaction under a stricter isolation, or None."""
    # tidemill's functions look for a row before they insert it. So 23505 (unique violation) means
    # that the transaction could not see the row.
    if error.sqlstate not in ("40001", "23505"):
        return None
    return SerializationConflict(
        "another transaction put the same key or id meanwhile; roll back and do your "
        f"transaction again ({_message(error)})"
    )


def _duplicate(diag: psycopg.errors.Diagnostic) -> DuplicateJob:
    what = diag.message_detail or ""
    if diag.message_primary == "key":
        return DuplicateJob.of_key(what, diag.message_hint or "")
    return DuplicateJob(f"a job with the id {what!r} exists already", what)


def _guess(error: psycopg.Error) -> str:
    """Guess the state from the text: libpq gives only a text while it connects."""
    text = str(error)
    for words, state in (
        ("password authentication failed", "28P01"),
        ("no password supplied", "28P01"),
        ("no pg_hba.conf entry", "28000"),
        ("does not exist", "3D000" if "database" in text else "28000"),
        ("too many clients", "53300"),
        ("remaining connection slots", "53300"),
        ("too many connections", "53300"),
    ):
        if words in text:
            return state
    return ""


def _message(error: psycopg.Error) -> str:
    if error.diag.message_primary:
        return error.diag.message_primary
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Is the server running")] or lines
    return lines[-1] if lines else type(error).__name__
