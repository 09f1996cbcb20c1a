"""Receipts: what a client shows to settle a message it was given.

A receipt names the owner that holds the lease, and the lease's token. The owner is the server that
handed it out: one beside it, or that was started anew, settles that, too. Owners of other kinds,
such as workers, speak for themselves alone: no receipt that somebody thought up settles their jobs.
"""

from __future__ import annotations

from tidemill.clock import new_id
from tidemill.server.problems import Problem

__all__ = ["new_owner_id", "parse", "receipt_of"]

_MARK = "desk-"
"""Ids of owners that hand out receipts begin so, and no other's do."""


def new_owner_id() -> str:
    """The id of an owner that hands out receipts."""
    return _MARK + new_id()


def receipt_of(owner: str, token: int) -> str:
    """The receipt of a lease."""
    return f"{owner}.{token:x}"


def parse(receipt: str) -> tuple[str, int]:
    """(owner, token) of a receipt.

    Raises:
        Problem: it is none.
    """
    owner, dot, token = receipt.rpartition(".")
    rest = owner.removeprefix(_MARK)
    ours = dot and rest != owner and rest.isalnum()
    if ours and receipt.isascii() and token.isalnum():
        try:
            number = int(token, 16)
        except ValueError:
            number = -1
        if 0 <= number < 2**63 and len(owner) <= 64:
            return owner, number
    raise Problem(
        "not-found",
        f"{receipt[:80]!r} is no receipt; reserve gives one, and what was reserved before an "
        "upgrade of the server is handed out again when its ttr is over",
    )
