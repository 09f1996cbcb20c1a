"""The caller's own transaction: Django's connection of this thread, and its commit."""

from __future__ import annotations

from typing import Any

from tidemill.errors import InvalidOption


def inside(alias: str) -> Any:
    """Django's connection of this thread if it is within ``atomic``; else None."""
    from django.db import connections

    wrapper = connections[alias]
    return wrapper if wrapper.in_atomic_block else None


def joined(txn: Any, alias: str) -> Any:
    """The connection that ``txn`` names; None without ``txn``."""
    if txn is None:
        return None
    from django.db import connections

    named = txn if isinstance(txn, str) else getattr(txn, "alias", None)
    if named != alias:
        raise InvalidOption(
            f"txn must be Django's connection of the database {alias!r}, "
            "as django.db.connection, or its alias"
        )
    wrapper = connections[alias]
    if not wrapper.in_atomic_block:
        raise InvalidOption(
            "txn is Django's connection outside of a transaction; put inside: "
            "with transaction.atomic():"
        )
    return wrapper
