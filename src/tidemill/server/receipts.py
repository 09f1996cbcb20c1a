"""Receipts: what a client shows to settle a job it was given.

A receipt names the owner that holds the lease, and the lease's token. The owner is the server that
handed it out: one beside it, or that was started anew, settles that, too. Owners of other kinds,
such as workers, speak for themselves alone: no receipt that somebody thought up settles their jobs.
The receipt of a task names the job, too: its record tells how long it may run, and whether it is to
be cancelled.

    desk-OWNER.TOKEN            a message
    desk-OWNER.TOKEN-once       a message with ttr 0
    desk-OWNER.TOKEN.JOB        a task; the job's id in base64
    …~SEAL                      handed to a token for some queues, which cannot use others'
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import NamedTuple

from tidemill.clock import new_id
from tidemill.server.problems import Problem

__all__ = ["Receipt", "is_desk", "new_owner_id", "parse", "receipt_of", "sealed"]

_MARK = "desk-"
"""Ids of owners that hand out receipts begin so, and no other's do."""

_ONCE = "-once"
"""Receipts of messages with ttr 0 end so."""


class Receipt(NamedTuple):
    """What a receipt says. ``job_id`` is empty for a message."""

    owner: str
    token: int
    job_id: str = ""


def new_owner_id() -> str:
    """The id of an owner that hands out receipts."""
    return _MARK + new_id()


def is_desk(owner_id: str) -> bool:
    """Whether an owner is one that hands out receipts: the desk of a server."""
    return owner_id.startswith(_MARK)


def receipt_of(owner: str, token: int, job_id: str = "", *, once: bool = False) -> str:
    """The receipt of a lease; ``once``: of a message with ttr 0, which is acknowledged already."""
    if job_id:
        job_id = "." + base64.urlsafe_b64encode(job_id.encode()).decode().rstrip("=")
    return f"{owner}.{token:x}{job_id}{_ONCE if once else ''}"


def sealed(receipt: str, secret: str) -> str:
    """The receipt as it is given to the token of this hash, and is good for that alone."""
    plain = receipt.partition("~")[0]
    seal = hmac.new(secret.encode(), plain.encode(), hashlib.sha256)
    return f"{plain}~{seal.hexdigest()[:32]}"


def parse(receipt: str, secret: str = "") -> Receipt:
    """What a receipt says. With a ``secret`` it has to be sealed for the token of this hash.

    Raises:
        Problem: it is none, or its message had ttr 0.
    """
    if secret and not hmac.compare_digest(sealed(receipt, secret).encode(), receipt.encode()):
        raise _none(receipt)
    plain = receipt.partition("~")[0]
    if plain.endswith(_ONCE):
        raise Problem(
            "at-most-once",
            "the message was put with ttr 0: it was acknowledged when it was handed out, and "
            "nobody else gets it. There is nothing left to settle; put it with a ttr if it is to "
            "come back when its consumer fails",
        )
    owner, _, rest = plain.partition(".")
    token, dot, job = rest.partition(".")
    name = owner.removeprefix(_MARK)
    if plain.isascii() and name != owner and name.isalnum() and token.isalnum():
        try:
            number, job_id = int(token, 16), _decoded(job)
        except ValueError:
            number, job_id = -1, ""
        if 0 <= number < 2**63 and len(owner) <= 64 and bool(job_id) == bool(dot):
            return Receipt(owner, number, job_id)
    raise _none(receipt)


def _decoded(job: str) -> str:
    return base64.b64decode(job + "=" * (-len(job) % 4), b"-_", validate=True).decode()


def _none(receipt: str) -> Problem:
    return Problem(
        "not-found",
        f"{receipt[:80]!r} is no receipt; reserve gives one, and what was reserved before an "
        "upgrade of the server is handed out again when its ttr is over",
    )
