"""Schedules that code declares, stored without a worker."""

from __future__ import annotations

from tidemill import Tidemill
from tidemill.schedules.record import declared, decode


def store_declared(mill: Tidemill) -> None:
    """Store the schedules of the code now, as a starting worker does. This removes no schedule."""
    for name, body in mill.runtime.code_schedules.bodies():
        (old,) = mill.broker.schedules([name])
        change = declared(name, decode(body), old, mill.broker.wall())
        if change is not None:
            (changed,) = mill.broker.change_schedules([change])
            assert changed.done
