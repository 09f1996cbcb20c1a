"""The state that the parts of the broker share."""

from __future__ import annotations

from tidemill.brokers.memory.transitions import Jobs
from tidemill.core.locks import Condition
from tidemill.core.owner import Command, Owner


class Part:
    """A part of the broker. :class:`.broker.MemoryBroker` makes the state."""

    url: str
    _lock: Condition
    _jobs: Jobs
    _owners: dict[str, Owner]
    _commands: dict[str, list[Command]]

    def wake(self, owner_id: str) -> None:
        raise NotImplementedError  # MemoryBroker has the sleepers

    def _wake_all(self) -> None:
        raise NotImplementedError  # MemoryBroker has the sleepers
