"""The role that a broker call needs, where it depends on the arguments (:mod:`.broker_rpc`).

A worker has an operator's token. It declares limits and schedules with the same calls with which an
admin changes them by hand. This module tells the two apart where that is possible; docs/brokers.md
lists the cases where it is not.

A shared owner of a server holds the jobs of clients with any token, so only an admin may act for
it.
"""

from __future__ import annotations

from typing import Any

from tidemill.brokers.contract.rpc import CALLS, Role
from tidemill.brokers.contract.schedules import Change
from tidemill.brokers.contract.store import Store
from tidemill.core.errors import CodecError
from tidemill.schedules.record import decode
from tidemill.server.http.receipts import is_server_owner

__all__ = ["needed"]


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
    elif name == "attach":
        by_hand = is_server_owner(arguments["owner"].id)
    elif name == "exchange":
        by_hand = is_server_owner(arguments["step"].owner)
    elif name == "command":
        by_hand = is_server_owner(arguments["owner_id"])
    return Role.ADMIN if by_hand else CALLS[name].role


def _is_by_hand(broker: Store, change: Change) -> bool:
    """Whether a change adds a schedule that no code declares, or removes one that still fires."""
    try:
        if not change.gone:
            return not change.expect and not decode(change.body).code
        if change.jobs:
            return False  # the schedule puts its last jobs
        (record,) = broker.schedules([change.name])
        if record is None or record.version != change.expect:
            return False  # nothing is changed
        was = decode(record.body)
        # A worker removes schedules that no code declares any more. A resumed schedule may end.
        return not (was.paused if change.body else was.undeclared)
    except CodecError:
        return True
