"""Tell brokers that this process has forked, since their connections belong to the parent."""

from __future__ import annotations

import weakref
from typing import Protocol

from tidemill.core.forks import after_fork


class _Forked(Protocol):
    def after_fork_child(self) -> None: ...


_brokers: weakref.WeakSet[_Forked] = weakref.WeakSet()


def tell_of_forks(broker: _Forked) -> None:
    """Call the broker's ``after_fork_child`` in each forked child while the broker lives."""
    _brokers.add(broker)


def _after_fork_child() -> None:
    for broker in list(_brokers):
        broker.after_fork_child()


after_fork(_after_fork_child)
