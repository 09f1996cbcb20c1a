"""Receipts: a client settles a reserved job with its receipt.

A receipt names the owner that holds the lease, and the token of the lease. The owner is a shared
owner of the server that delivered the job; any server on the store can settle the job. Other owners
have ids of another form, so no forged receipt can settle their jobs.

    desk-OWNER.TOKEN            a message
    desk-OWNER.TOKEN-once       a message with ttr 0
    desk-OWNER.TOKEN.JOB        a task; the job's id in base64
    desk-OWNER.TOKEN.JOB.next   a task whose result other jobs wait for
    …~SEAL                      given to a token for some queues, and valid for this token only

The server remembers the receipts that it has settled, to tell a request that is repeated because
its answer was lost from a lost lease. It forgets them at a restart.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from tidemill.core.clock import clock, new_id
from tidemill.server.http.problems import Problem

_MARK = "desk-"  # the prefix of the ids of shared owners; no other owner's id begins with it
_ONCE = "-once"  # the suffix of receipts of messages with ttr 0

_NEXT = ".next"
"""The suffix of receipts of tasks that hand their result on: the server may have to sign it."""


KEPT = 100_000  # the number of latest settled receipts that are kept, and of latest jobs put by id

REPEATS = 600.0
"""Seconds for which a put by id can be repeated, even when its job is no longer kept."""


class Receipt(NamedTuple):
    """The parts of a receipt. ``job_id`` is empty for a message."""

    owner: str
    token: int
    job_id: str = ""
    hands_on: bool = False


def new_owner_id() -> str:
    return _MARK + new_id()


def is_server_owner(owner_id: str) -> bool:
    return owner_id.startswith(_MARK)


def receipt_of(
    owner: str, token: int, job_id: str = "", *, once: bool = False, hands_on: bool = False
) -> str:
    """The receipt of a lease. ``once``: acknowledged already. ``hands_on``: others wait."""
    if job_id:
        job_id = "." + base64.urlsafe_b64encode(job_id.encode()).decode().rstrip("=")
        job_id += _NEXT if hands_on else ""
    return f"{owner}.{token:x}{job_id}{_ONCE if once else ''}"


def sealed(receipt: str, secret: str) -> str:
    """The receipt in the form for the API token with this hash; no other token can use it."""
    plain = receipt.partition("~")[0]
    seal = hmac.new(secret.encode(), plain.encode(), hashlib.sha256)
    return f"{plain}~{seal.hexdigest()[:32]}"


def parse(receipt: str, secret: str = "") -> Receipt:
    """The parts of a receipt. With a ``secret`` it must be sealed for the token with this hash."""
    if secret and not hmac.compare_digest(sealed(receipt, secret).encode(), receipt.encode()):
        raise _none(receipt)
    plain = receipt.partition("~")[0]
    if plain.endswith(_ONCE):
        raise Problem(
            "at-most-once",
            "the message was put with ttr 0: it was acknowledged when it was delivered, so there "
            "is nothing to settle. To deliver a message again when its consumer fails, put it "
            "with a ttr",
        )
    owner, _, rest = plain.partition(".")
    token, dot, job = rest.removesuffix(_NEXT).partition(".")
    name = owner.removeprefix(_MARK)
    if plain.isascii() and name != owner and name.isalnum() and token.isalnum():
        try:
            number, job_id = int(token, 16), _decoded(job)
        except ValueError:
            number, job_id = -1, ""
        then = rest.endswith(_NEXT)
        whole = bool(job_id) if then else bool(job_id) == bool(dot)
        if 0 <= number < 2**63 and len(owner) <= 64 and whole:
            return Receipt(owner, number, job_id, then)
    raise _none(receipt)


def _decoded(job: str) -> str:
    return base64.b64decode(job + "=" * (-len(job) % 4), b"-_", validate=True).decode()


def _none(receipt: str) -> Problem:
    return Problem(
        "not-found",
        f"{receipt[:80]!r} is not a valid receipt; use a receipt from a reserve call. A job that "
        "was reserved before an upgrade of the server is delivered again after its ttr",
    )


class PutsById:
    """The latest jobs put under ids of clients, in memory: a record would cost a second write."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, tuple[bytes, float]] = OrderedDict()

    def add(self, job_id: str, digest: bytes) -> None:
        """Record the digest of a job that is stored now."""
        now = clock.machine()
        self._jobs[job_id] = digest, now + REPEATS
        self._jobs.move_to_end(job_id)
        while len(self._jobs) > KEPT or next(iter(self._jobs.values()))[1] <= now:
            self._jobs.popitem(last=False)

    def forget(self, ids: Iterable[str] | None = None) -> None:
        """Forget these jobs, or all: a client has deleted them, so their ids are free."""
        for job_id in [*self._jobs] if ids is None else ids:
            self._jobs.pop(job_id, None)

    def has(self, job_id: str, digest: bytes) -> bool:
        """Whether the job with this digest was put under the id a short time ago."""
        known, until = self._jobs.get(job_id, (b"", 0.0))
        return known == digest and clock.machine() < until
