"""A broker with all parts of the contract: the type that applications and tools receive.

A broker that lacks a part still has the calls of the part, which raise ``FeatureMissing``.
"""

from __future__ import annotations

from typing import Protocol

from tidemill.brokers.contract.admin import Admin
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.carrier import Recall
from tidemill.brokers.contract.inspection import Inspection
from tidemill.brokers.contract.job_waits import JobWaits
from tidemill.brokers.contract.remote_owners import RemoteOwners
from tidemill.brokers.contract.schedules import Schedules
from tidemill.brokers.contract.transfer import Transfer

__all__ = ["Store"]


class Store(
    Broker,
    Inspection,
    Admin,
    JobWaits,
    Schedules,
    Transfer,
    Recall,
    RemoteOwners,
    Protocol,
):
    """A broker with every part of the contract. Features say which calls it answers."""
