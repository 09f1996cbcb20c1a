"""Who may make a call of the seam, where what it says decides: :mod:`.calls`.

A worker has an operator's token, and what its code declares it says by the calls with which others
change things by hand. What can be told apart is: docs/brokers.md says what cannot.

The desk of a server holds what the clients of all tokens have taken. Only an admin speaks for it.
"""

from __future__ import annotations

from typing import Any

from tidemill.brokers.base import Broker
from tidemill.brokers.calls import CALLS, Role
from tidemill.brokers.schedules import Change
from tidemill.errors import CodecError
from tidemill.schedules.stored import decode
from tidemill.server.receipts import is_desk

__all__ = ["needed"]


def needed(broker: Broker, name: str, arguments: dict[str, Any]) -> str:
    """The role that a call takes with these arguments."""
    by_hand = False
    if name == "set_limit":
        by_hand = not arguments["declared"] or arguments["terms"] is None
    elif name == "change_schedules":
        by_hand = any(_is_by_hand(broker, change) for change in arguments["changes"])
    elif name in ("detach", "release"):
        owner_id = arguments["owner_id"]
        by_hand = is_desk(owner_id) or any(
            owner.id == owner_id and not owner.lease for owner in broker.owners()
        )
    elif name == "attach":
        by_hand = is_desk(arguments["owner"].id)
    elif name == "exchange":
        by_hand = is_desk(arguments["step"].owner)
    elif name == "command":
        by_hand = is_desk(arguments["owner_id"])
    return Role.ADMIN if by_hand else CALLS[name].role


def _is_by_hand(broker: Broker, change: Change) -> bool:
    """Whether a schedule is added that no code declares, or one removed that has not ended."""
    try:
        if not change.gone:
            return not change.expect and not decode(change.body).code
        if change.jobs:
            return False  # its last
        (record,) = broker.schedules([change.name])
        if record is None or record.version != change.expect:
            return False  # nothing is changed
        was = decode(record.body)
        # A worker removes what nobody declares any more; what is resumed may have no time left.
        return not (was.paused if change.body else was.undeclared)
    except CodecError:
        return True
