"""The part of the contract for owners on machines that cannot open the store.

A *remote owner* (``Feature.REMOTE_OWNERS``) reaches the store through a job server, which makes the
calls of the owner. The owner attaches with ``Owner.lease`` and belongs to no process of the store's
machine. When the server is killed, a remote owner keeps its leases, and any process that has the
store open may make the owner's next call. Attaching the same owner again continues its session.

A call, a reply or the server may be lost at any moment. So three rules apply:

- **Serials.** Each step of a remote owner has a serial. A step with the serial of the last step is
  a repetition: the store answers it again, but does not repeat its effects. The second answer has
  the leases of the first answer that the owner still holds, and perhaps new leases. A step with a
  lower serial came late and is refused. A put has a ``nonce`` instead of a serial. So the caller
  repeats a call until an answer comes.
- **Sign of life.** Only an exchange shows that a remote owner lives. ``wait`` returns after a third
  of the lease, in time for the next exchange. The store gives up a remote owner that is silent for
  as long as its lease. Then its jobs get a loss, and its next call gets the command ``lost``. The
  store does not give up a consumer while the ttr (time to run) of one of its messages lasts. A step
  by another process for the owner (``Step.behalf``) is no sign of life.
- **Silence** is counted by the process that makes the owner's calls
  (:meth:`RemoteOwners.count_silence`). Time in which this process, its server or its machine did
  not run does not count.
"""

from __future__ import annotations

from typing import Protocol


class RemoteOwners(Protocol):
    """Counts the silence of remote owners."""

    def count_silence(self) -> float:
        """Give up remote owners whose lease has passed; return the seconds until the next call.

        Called by the process that makes the owners' calls. Silence grows by the time between two
        calls of this method in the same process. When this time is more than twice the agreed
        interval, the process did not run and could hear no owner. Then every lease begins again.
        """
        ...
