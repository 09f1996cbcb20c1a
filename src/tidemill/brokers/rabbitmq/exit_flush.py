"""Flush the brokers of a process that ends without closing them.

A connection thread writes acknowledgements. The interpreter does not wait for that thread. Without
a flush, the server would hand out again the messages that the process acknowledged last.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Protocol

__all__ = ["flush_at_exit"]


class _Flushed(Protocol):
    def flush(self) -> None: ...


_brokers: weakref.WeakSet[_Flushed] = weakref.WeakSet()


def flush_at_exit(broker: _Flushed) -> None:
    """Have ``flush`` called when the interpreter ends while the broker is open."""
    _brokers.add(broker)


@atexit.register
def _flush_all() -> None:
    for broker in list(_brokers):
        with contextlib.suppress(Exception):  # the server is away: the messages come once more
            broker.flush()
