"""Checks of broker calls (:mod:`.broker_rpc`): the needed role, and the values of arguments.

The role of some calls depends on the arguments. A worker has an operator's token. The worker
declares limits and schedules. An admin changes them by hand, with the same calls. This module tells
declarations from changes by hand where it can. ``docs/brokers/http.md`` lists the cases in which it
cannot.

A shared owner of a server holds jobs of many clients, with different tokens. So only an admin may
act for a shared owner.

A client of another release may lack the checks of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.brokers.contract.inspection import HOLDS
from tidemill.brokers.contract.rpc import CALLS, Role
from tidemill.brokers.contract.schedules import LAST_OWN, Change
from tidemill.brokers.contract.store import Store
from tidemill.core.codec import check_size
from tidemill.core.config import LATEST, MAX_NAME, MAX_SECONDS, check_name
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner
from tidemill.errors import CodecError, InvalidOption
from tidemill.schedules.record import decode
from tidemill.server.http.receipts import is_server_owner

MAX_QUEUES = 10_000
"""Queues that an owner may list."""

_BOUNDS = {
    "rank": 2**32 - 1,
    "delay": MAX_SECONDS,
    "timeout": MAX_SECONDS,
    **dict.fromkeys(("at", "created", "expires"), LATEST),
}
"""The highest value of each number in a job. Clients check these before they send a job."""


def needed(broker: Store, name: str, arguments: dict[str, Any]) -> str:
    """The role that a call needs with these arguments."""
    by_hand = False
    if name == "set_limit":
        by_hand = not arguments["declared"] or arguments["terms"] is None
    elif name == "change_schedules":
        by_hand = any(_is_by_hand(broker, change) for change in arguments["changes"])
    elif name in ("detach", "release"):
        owner_id = arguments["owner_id"]
        by_hand = is_server_owner(owner_id) or any(
            owner.id == owner_id and not owner.lease for owner in broker.owners()
        )
    elif name == "cancel":
        by_hand = bool(arguments["purge"])
    elif name == "forget_queue":
        by_hand = not arguments["queue"].startswith(HOLDS)  # clients delete queues of ended holds
    elif name == "attach":
        by_hand = is_server_owner(arguments["owner"].id)
    elif name == "exchange":
        by_hand = is_server_owner(arguments["step"].owner)
    elif name == "command":
        by_hand = is_server_owner(arguments["owner_id"])
    return Role.ADMIN if by_hand else CALLS[name].role


def _is_by_hand(broker: Store, change: Change) -> bool:
    """Whether a change adds a schedule that no code declares, or removes a schedule that fires."""
    if change.name < LAST_OWN:
        return False  # a declaration of a task, a binding of a queue, or a note
    try:
        if not change.gone:
            return not change.expect and not decode(change.body).code
        if change.jobs:
            return False  # the schedule puts its last jobs
        (record,) = broker.schedules([change.name])
        if record is None or record.version != change.expect:
            return False  # nothing is changed
        was = decode(record.body)
        # A worker removes schedules that no code declares any more. An operator may resume a paused
        # schedule, which may then end.
        return not (was.paused if change.body else was.undeclared)
    except CodecError:
        return True


def check_jobs(jobs: Sequence[Envelope]) -> None:
    """Refuse names and times that a store cannot keep, and bodies that are too large."""
    for job in jobs:
        if not (job.id and job.queue):
            raise InvalidOption("a job must have an id and a queue")
        for name in (job.id, job.queue, job.task, job.key):
            if len(name) * 4 > MAX_NAME and len(name.encode()) > MAX_NAME:
                raise InvalidOption(f"the name {name[:40]!r}… has more than {MAX_NAME} bytes")
        for what, bound in _BOUNDS.items():
            value = getattr(job, what)
            if not 0 <= value <= bound:  # refuses NaN, too
                raise InvalidOption(f"the {what} of a job must be 0 to {bound:.0f}, not {value}")
        check_size(job.body, job.headers, job.tags)


def check_owner(owner: Owner) -> None:
    """Refuse invalid names of an owner, its kind, its host and its queues."""
    check_name("the id of an owner", owner.id)
    for what, name in [("kind", owner.kind), ("name", owner.name), ("host", owner.host)]:
        if name:
            check_name(f"the {what} of an owner", name)
    if len(owner.queues) > MAX_QUEUES:
        raise InvalidOption(f"an owner has {MAX_QUEUES:,} queues at most, not {len(owner.queues)}")
    for name in owner.queues:
        check_name("a queue of an owner", name)


def check_seconds(what: str, seconds: float) -> None:
    """Refuse durations that the clock of a store cannot hold."""
    if not 0 <= seconds <= MAX_SECONDS:  # refuses NaN, too
        raise InvalidOption(f"{what} must be 0 to {MAX_SECONDS:.0f} seconds, not {seconds}")


def check_target(rank: int | None, queue: str | None) -> None:
    """Refuse a rank or a queue that no job can have."""
    if rank is not None and not 0 <= rank <= _BOUNDS["rank"]:
        raise InvalidOption(f"the rank of a job must be 0 to {_BOUNDS['rank']:.0f}, not {rank}")
    if queue is not None:
        check_name("queue", queue)
