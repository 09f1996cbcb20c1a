"""The role that a broker call needs, if the role depends on the arguments (:mod:`.broker_rpc`).

A worker has an operator's token. The worker declares limits and schedules. An admin changes them by
hand, with the same calls. This module tells declarations from changes by hand where it can.
``docs/brokers.md`` lists the cases in which it cannot.

A shared owner of a server holds jobs of many clients, with different tokens. So only an admin may
act for a shared owner.
"""

from __future__ import annotations

from typing import Any

from tidemill.brokers.contract.inspection import HOLDS
from tidemill.brokers.contract.rpc import CALLS, Role
from tidemill.brokers.contract.schedules import LAST_OWN, Change
from tidemill.brokers.contract.store import Store
from tidemill.core.errors import CodecError
from tidemill.schedules.record import decode
from tidemill.server.http.receipts import is_server_owner


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
