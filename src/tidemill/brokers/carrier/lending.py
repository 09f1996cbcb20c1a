"""Stores that lend leases to a carrier."""

from __future__ import annotations

from typing import Protocol, cast

from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.store import Store


class LendingStore(Store, Protocol):
    """A store that lends leases to a carrier."""

    @property
    def identity(self) -> str:
        """The id of this store."""
        ...


def lending_store(broker: Store) -> LendingStore:
    """The broker, typed as a store that lends leases to a carrier.

    Raises:
        FeatureMissing: the broker lends no leases.
    """
    need(broker, Feature.CARRY, "store=")
    return cast(LendingStore, broker)
