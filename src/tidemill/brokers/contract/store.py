"""A broker with all parts of the contract: the type that applications and tools receive.

A broker that lacks a part still has the calls of the part, which raise ``FeatureMissing``.
"""

from __future__ import annotations

from typing import Protocol

from tidemill.brokers.contract.admin import Admin
from tidemill.brokers.contract.broker import Broker, RemoteOwners
from tidemill.brokers.contract.inspection import Inspection, JobWaits
from tidemill.brokers.contract.schedules import Schedules
from tidemill.brokers.contract.transfer import Transfer
from tidemill.core.clock import clock


class Store(Broker, Inspection, Admin, JobWaits, Schedules, Transfer, RemoteOwners, Protocol):
    """A broker with every part of the contract. Features say which calls it answers."""


def clock_ahead(store: Store) -> float:
    """Seconds by which the clock of this machine is ahead of the store's clock; 0 if unclear.

    The store reads its clock at an unknown moment of the call.
    """
    before, there, after = clock.wall(), store.wall(), clock.wall()
    return before - there if there < before else min(0.0, after - there)
