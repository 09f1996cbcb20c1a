"""Flush the brokers of a process that ends without closing them.

A connection thread writes acknowledgements, and the interpreter does not wait for this thread.
Without a flush, the server would deliver again the messages that the process acknowledged last.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Protocol

from tidemill.core.forks import check_fork


class _Flushed(Protocol):
    def flush(self) -> None: ...


_brokers: weakref.WeakSet[_Flushed] = weakref.WeakSet()


def flush_at_exit(broker: _Flushed) -> None:
    """Have ``flush`` called when the interpreter ends while the broker is open."""
    _brokers.add(broker)


@atexit.register
def _flush_all() -> None:
    check_fork()  # the parent flushes its own
    for broker in list(_brokers):
        # If the server is away, it delivers the messages again.
        with contextlib.suppress(Exception):
            broker.flush()
