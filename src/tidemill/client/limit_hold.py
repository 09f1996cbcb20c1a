"""Hold a place of a limit in any code: ``with mill.limits.hold("db"):``.

The place is the lease of a message that has the limit. So stores count the place of a hold as they
count the place of a job. When the process of the hold dies, its place becomes free. Each hold has
an owner to itself, and puts its message into a queue that is named after this owner. So each hold
takes its own message. At the end, the message is acknowledged and the queue is deleted. A killed
process may leave its queue behind. The first hold of each process deletes the queues of owners that
are gone.

=============================  =====================================================
killed                         what is left
=============================  =====================================================
before the put                 nothing
between the put and the lease  a ready message that nobody takes; it holds no place
while it holds the place       a failed message, once the death is noticed
after the acknowledgement      an empty queue
=============================  =====================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

from tidemill.brokers.contract.inspection import HOLDS
from tidemill.client.consumers import FOREVER, Session, Stop
from tidemill.client.lease_renewal import LEASE, LeaseRenewal
from tidemill.client.message import Message
from tidemill.client.messages import Queue
from tidemill.client.queue_deletion import delete_queue
from tidemill.core.crash_points import point
from tidemill.core.errors import LeaseLost, LimitTimeout, TidemillError
from tidemill.core.locks import Lock
from tidemill.limits.declare import Limit

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class Holds:
    """The places that one app holds in this process.

    Attributes:
        active: the holds that have their place.
        renewal: renews the leases of their messages.
    """

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill
        self._pid = 0
        self.active: set[LimitHold] = set()
        self.renewal = LeaseRenewal()

    def tidy(self) -> None:
        """Delete queues that killed processes left behind: once in each process."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        broker = self._mill.broker
        # Read the queues before the owners: an owner is attached before its queue is made.
        queues = [row.name for row in broker.stats() if row.name.startswith(HOLDS)]
        owners = {owner.id for owner in broker.owners()} if queues else set()
        for queue in queues:
            if queue.removeprefix(HOLDS) not in owners:
                with contextlib.suppress(TidemillError):  # another process may have deleted it
                    delete_queue(self._mill, queue, force=True)

    def close(self) -> None:
        """Free all places: the app is closed."""
        for hold in list(self.active):
            with contextlib.suppress(TidemillError):  # the end of the lease also frees the place
                hold.release()


class LimitHold:
    """A place of a limit for the length of a block, sync or async. Each block needs its own hold.

    Raises:
        LimitTimeout: no place was free in time.
        LeaseLost: the process stood still for so long that it lost the place inside the block.
    """

    def __init__(self, mill: Runtime, holds: Holds, limit: Limit, timeout: float | None) -> None:
        self._mill = mill
        self._holds = holds
        self._limit = limit
        self._timeout = timeout
        self._lock = Lock()
        self._place: tuple[Session, str, Message] | None = None

    def __enter__(self) -> LimitHold:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.release() and kind is None:
            raise LeaseLost(
                f"the place of the limit {self._limit.name!r} was lost inside the block: the "
                f"process stood still for {LEASE:g} s, and others may have taken the place"
            )

    async def __aenter__(self) -> LimitHold:
        stop = Stop(self._mill)
        call = self._mill.waiters.begin(self._begin, stop)
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            stop.stop()
            call.add_done_callback(self._release_later)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Without the shield, a cancellation could drop this call before it begins.
        await asyncio.shield(self._mill.threads.begin(self.__exit__, kind))

    def _release_later(self, call: asyncio.Future[None]) -> None:
        if not call.cancelled() and call.exception() is None:
            self._mill.threads.start(self.release)

    def _begin(self, stop: Stop | None = None) -> None:
        """Wait for a place and take it."""
        mill = self._mill
        if mill.sync:
            return
        self._holds.tidy()
        session: Session = mill.consumers.session
        owner = session.lend(mill)
        try:
            message = self._take(session, owner, stop)
        except BaseException:
            session.take_back(owner)
            raise
        self._place = session, owner, message
        self._holds.active.add(self)
        self._holds.renewal.add(message)
        point("hold.begun")

    def _take(self, session: Session, owner: str, stop: Stop | None) -> Message:
        """Put a message and take it; delete the message if that fails."""
        mill, queue = self._mill, HOLDS + owner
        deadline = time.monotonic() + (FOREVER if self._timeout is None else self._timeout)
        text = f"a place of the limit {self._limit.name!r}"
        # No retries: if the lease is lost, nobody may take the message.
        envelope = Queue(mill, queue).envelope(text, limit=self._limit, ttr=LEASE, retries=0)
        with session.waits(owner):
            try:
                mill.broker.put([envelope])  # stored now, even inside a batch
                point("hold.put")
                taken = mill.consumers.receive(session, owner, (queue,), deadline, stop)
                if not taken:
                    raise self._not_taken(session)
                return taken[0]
            except BaseException:
                with contextlib.suppress(TidemillError):  # another process tidies up later
                    mill.broker.delete([envelope.id])
                    mill.broker.forget_queue(queue)
                raise

    def _not_taken(self, session: Session) -> TidemillError:
        if session.over:
            return TidemillError(
                f"the app was closed before a place of the limit {self._limit.name!r} was free"
            )
        # Without a timeout only a cancellation leads here, and nobody reads this error.
        seconds = self._timeout or 0.0
        return LimitTimeout(
            f"no place of the limit {self._limit.name!r} was free within {seconds:g} s"
        )

    def release(self) -> bool:
        """Free the place now; False when the place was lost. A second call returns True."""
        with self._lock:
            place, self._place = self._place, None
        if place is None or place[0].pid != os.getpid():  # a forked child has no place
            return True
        session, owner, message = place
        self._holds.active.discard(self)
        self._holds.renewal.remove(message)
        try:
            kept = message.ack()
            point("hold.ended")
            with contextlib.suppress(TidemillError):  # another process tidies up later
                if not kept:
                    self._mill.broker.delete([message.id])
                self._mill.broker.forget_queue(message.queue)
        finally:
            session.take_back(owner)
        return kept
