"""How one process takes messages: its owners, and waits that an event loop may give up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidemill.brokers.base import Mode, Reply, Step, Want
from tidemill.clock import new_id, wall_time
from tidemill.codec import verify
from tidemill.config import Seconds, check_name, check_seconds
from tidemill.errors import BadSignature, CodecError, InvalidOption
from tidemill.job import Lease, Outcome, Owner, Verdict
from tidemill.queue import Message

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["Consumers"]

log = logging.getLogger("tidemill")

FOREVER = 1e9


class Consumers:
    """The owners by which one process takes messages: one for each get that waits at a time."""

    def __init__(self, mill: Tidemill) -> None:
        self.mill = mill
        self.close()

    def get(
        self, queues: Sequence[str], timeout: Seconds | None, stop: Stop | None = None
    ) -> Message | None:
        """See :meth:`tidemill.Tidemill.get`."""
        if isinstance(queues, str) or not queues:
            raise InvalidOption("queues must be a list of at least one queue name")
        names = tuple(check_name("queue", name) for name in queues)
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        deadline = time.monotonic() + seconds
        with self._owner() as owner:
            asleep = False
            try:
                while stop is None or stop.goes_on(owner):
                    left = deadline - time.monotonic()
                    # The last look does not ask to be hinted: nobody will be there to hear it.
                    want = Want(1, names, Mode.STRICT, tasks=False, messages=True, sleep=left > 0)
                    asleep = left > 0
                    reply = self.exchange(Step(owner, want=want))
                    if reply.leases:
                        asleep = False
                        message = self._open(owner, reply.leases[0])
                        if message is not None:
                            return message
                    elif left <= 0:
                        return None
                    else:
                        self.mill.broker.wait(owner, max(0.0, min(left, reply.next_due)))
            finally:
                if asleep:  # interrupted: a hint for us must reach somebody else
                    want = Want(0, names, Mode.STRICT, tasks=False, messages=True, sleep=False)
                    self.exchange(Step(owner, want=want))
        return None

    async def aget(self, queues: Sequence[str], timeout: Seconds | None) -> Message | None:
        """As ``get``; when cancelled, nothing stays taken."""
        stop = Stop(self.mill)

        def take() -> Message | None:
            message = self.get(queues, timeout, stop)
            if message is not None and not stop.hand_over():
                message.release()
                return None
            return message

        try:
            return await (self.mill.threaded if timeout == 0 else self.mill.patiently)(take)
        except asyncio.CancelledError:
            stop.stop()
            raise

    def _open(self, owner: str, lease: Lease) -> Message | None:
        """The message of a lease; None when it is not to be trusted, and has failed for that."""
        try:
            envelope = lease.open()
            if self.mill.keys:
                verify(envelope, self.mill.keys)
            elif envelope.pickled:
                raise BadSignature("bad signature: a pickled body is only opened when it is signed")
        except (CodecError, msgspec.DecodeError) as error:
            log.error("a message in one of our queues cannot be used: %s", error)
            now = wall_time()
            verdict = Verdict(
                lease.token, Outcome.FAIL, error=str(error), started=lease.leased, ended=now
            )
            self.exchange(Step(owner, verdicts=[verdict]))
            return None
        return Message(self, owner, lease, envelope)

    def exchange(self, step: Step) -> Reply:
        """One exchange of an owner of this process."""
        reply = self.mill.broker.exchange(step)
        if any(command.verb == "lost" for command in reply.commands):
            # Silent for longer than its lease, it was given up; what it held had run out before.
            owner = self._attached.get(step.owner)
            if owner is not None:  # not closed meanwhile
                self.mill.broker.attach(owner)
        return reply

    @contextlib.contextmanager
    def _owner(self) -> Iterator[str]:
        idle, owner = self._take()
        try:
            yield owner
        finally:
            idle.append(owner)  # of the time it was taken from: a close meanwhile forgets it

    def _take(self) -> tuple[list[str], str]:
        if self._pid != os.getpid():  # a forked child: those were the parent's
            self.close()
        idle = self._idle
        try:
            return idle, idle.pop()
        except IndexError:
            pass
        host, pid = socket.gethostname(), os.getpid()
        owner = Owner(
            id=new_id(),
            kind="consumer",
            name=f"{host}:{pid}",
            host=host,
            pid=pid,
            started=wall_time(),
        )
        self.mill.broker.attach(owner)
        self._attached[owner.id] = owner
        return idle, owner.id

    def close(self) -> None:
        """Forget the owners; the broker lets them go when it is closed."""
        self._idle: list[str] = []
        self._attached: dict[str, Owner] = {}
        self._pid = os.getpid()


class Stop:
    """How an event loop tells a thread that waits for a message that it is not wanted any more."""

    def __init__(self, mill: Tidemill) -> None:
        self._mill = mill
        self._lock = threading.Lock()
        self._owner = ""
        self._over = False

    def goes_on(self, owner: str) -> bool:
        """In the thread, before each look: may it go on?"""
        with self._lock:
            self._owner = owner
            return not self._over

    def hand_over(self) -> bool:
        """In the thread, with a message in hand: does anybody still want it?"""
        with self._lock:
            self._owner = ""
            return not self._over

    def stop(self) -> None:
        """In the loop: the call was cancelled."""
        with self._lock:
            self._over = True
            if self._owner:
                self._mill.broker.wake(self._owner)
