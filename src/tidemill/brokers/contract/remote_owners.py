"""The part of the contract for owners on machines that cannot open the store.

A *remote owner* (``Feature.REMOTE_OWNERS``) reaches the store through a job server, which makes its
calls. It attaches with ``Owner.lease`` and belongs to no process of the store's machine. When the
server is killed, a remote owner keeps its leases, and any process that has the store open may make
its next call. Attaching the same owner again continues its session.

Three rules keep the laws although a call, a reply or the server may be lost at any moment:

- **Serials.** Each step of a remote owner has a serial. A step with the serial of the last step is
  a repetition: the store answers it again and does not do it again. The answer has the leases of
  the first answer that still stand, and perhaps more that the owner lacks. A step with a lower
  serial came late and is refused. A put has a ``nonce``. So the caller repeats until it has an
  answer.
- **Sign of life.** Only an exchange shows that a remote owner lives. ``wait`` returns in time for
  the next exchange, after a third of the lease. A remote owner that is silent for its lease is
  given up: its jobs get a loss, and its next call gets the command ``lost``. A consumer is not
  given up while the ttr of a message that it holds runs. A step that another process hands in for
  the owner (``Step.behalf``) is no sign of life.
- **Silence** is counted by the process that hears the owner (:meth:`RemoteOwners.count_silence`).
  Time in which the owner could not be heard does not count: a server that was down or stopped, or
  a machine that restarted.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["RemoteOwners"]


class RemoteOwners(Protocol):
    """Counts the silence of remote owners."""

    def count_silence(self) -> float:
        """Give up remote owners that were silent for their lease; seconds until the next call.

        Called by the process that makes the owners' calls, since it hears them. Silence grows by
        the time between two calls in the same process. When that time is more than twice the
        agreed interval, no owner could be heard, and every lease begins anew.
        """
        ...
