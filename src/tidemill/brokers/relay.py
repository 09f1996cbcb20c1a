"""The relay: it brings what is ready in a store to a carrier, and hands the leases over.

One runs in each worker, an owner of its own, in a thread. It leases in the ordinary way, publishes
what it leased, and only when the carrier has confirmed that, the leases are the carrier's. Killed
in between, they go back as those of any dead owner do, and are published once more; the messages
that were out by then are stale, since whoever gets one takes the lease by its token before it runs
anything.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from tidemill.brokers.base import Broker, Mode, Step, Want
from tidemill.clock import new_id
from tidemill.crash import point
from tidemill.errors import BrokerUnavailable, StoreFull, StoreMoved, TidemillError
from tidemill.job import RELAY, Envelope, Lease, Outcome, Owner, Verdict
from tidemill.retry import ENDLESS

__all__ = ["InvalidMessage", "Relay", "unwrap"]

log = logging.getLogger("tidemill.relay")

BATCH = 500
"""Leases brought over at a time."""

_TRY_AGAIN = 1.0
"""Seconds, when one of the two is away."""

LOOK_EVERY, LOOK_AGAIN, LOOKS = 30.0, 2.0, 10
"""Seconds between two looks whether the carrier still has what was given to it, and between those
that follow one by which it has not; so many in a row must find that."""

_FAREWELL = 10.0
"""Seconds for what it is about when it is told to end."""

_TASK = "tidemill.carried"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Lease).decode


def wrap(lease: Lease) -> Envelope:
    """A lease as the carrier brings it: in a job of its own name, which the carrier never ends."""
    job = lease.open()
    return Envelope(
        id=f"{lease.token}@{job.id}",
        queue=job.queue,
        task=_TASK,
        body=_encode(lease),
        rank=lease.rank,
        retries=ENDLESS,
    )


class InvalidMessage(Exception):
    """What the carrier brought was never given to it by a relay."""


def unwrap(brought: Lease) -> tuple[str, Lease]:
    """The id of the job, and its lease, from what the carrier brought.

    Raises:
        InvalidMessage: it was put there by somebody else.
    """
    message = brought.open()
    if message.task != _TASK:
        raise InvalidMessage(
            "it was put without a store, and its workers have one: run a worker without store= "
            "for it, or use another prefix"
        )
    return message.id.partition("@")[2], _decode(message.body)


class Relay:
    """The thread, and its owner; ``published`` is told what the carrier has got."""

    def __init__(
        self,
        store: Broker,
        carrier: Broker,
        owner: Owner,
        published: Callable[[Sequence[Envelope]], None],
    ) -> None:
        self._store = store
        self._carrier = carrier
        self._published = published
        self._queues = owner.queues
        self.owner = msgspec.structs.replace(owner, id=new_id(), kind=RELAY, board="")
        self._stopping = threading.Event()
        self._troubled = False
        self._next_look = time.monotonic() + LOOK_EVERY
        self._missing: set[str] = set()  # queues of which the carrier had nothing, at each look
        self._looks = 0  # so many of them
        self._asked, self._looked = 0, -1  # the numbers of looks that were asked for, and done
        self._thread = threading.Thread(target=self._run, name="tidemill-relay", daemon=True)
        store.attach(self.owner)
        self._thread.start()

    def ask(self) -> int:
        """Have it look in the store: the number of that look."""
        self._asked += 1
        self._store.wake(self.owner.id)
        return self._asked

    def has_looked(self, number: int) -> bool:
        """Whether all that was there when it was asked is with the carrier."""
        return self._looked >= number

    def stop(self) -> None:
        """End, and give back what was not handed over."""
        self._stopping.set()
        with contextlib.suppress(BrokerUnavailable):
            self._store.wake(self.owner.id)
        self._thread.join(_FAREWELL)
        with contextlib.suppress(BrokerUnavailable):  # its leases go back when it is given up
            self._store.detach(self.owner.id)

    # -- its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        verdicts: Sequence[Verdict] = ()
        while not self._stopping.is_set():
            try:
                verdicts = self._turn(verdicts)
            except (BrokerUnavailable, StoreFull, StoreMoved) as error:
                self._say(error)
                self._stopping.wait(_TRY_AGAIN)
            except Exception:  # its end would be that of all it holds
                if not self._stopping.is_set():
                    log.exception("the relay goes on after an error")
                    self._stopping.wait(_TRY_AGAIN)
        if verdicts:
            with contextlib.suppress(TidemillError):  # then they go back
                self._store.exchange(Step(self.owner.id, verdicts))

    def _turn(self, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
        """Hand over what was published, lease more, publish that: what came of it."""
        want, asked = Want(BATCH, self._queues, Mode.FAIR), self._asked
        reply = self._store.exchange(Step(self.owner.id, verdicts, want))
        if any(command.verb == "lost" for command in reply.commands):
            self._store.attach(self.owner)
            return ()
        if time.monotonic() >= self._next_look:
            self._look()
        if reply.leases:
            point("relay.leased")
            return self._publish(reply.leases)
        self._looked = asked
        if self._troubled:
            self._troubled = False
            log.info("jobs are brought over again")
        if not self._stopping.is_set():
            left = max(0.0, self._next_look - time.monotonic())
            self._store.wait(self.owner.id, min(reply.next_due, left))
        return ()

    def _publish(self, leases: Sequence[Lease]) -> Sequence[Verdict]:
        outcome = Outcome.CARRY
        try:
            jobs = [wrap(lease) for lease in leases]
            self._carrier.put(jobs)
            self._published(jobs)
        except TidemillError as error:
            self._say(error)
            outcome = Outcome.RELEASE
            self._stopping.wait(_TRY_AGAIN)
        point("relay.published")
        return [Verdict(lease.token, outcome) for lease in leases]

    def _say(self, error: Exception) -> None:
        if not self._troubled:
            self._troubled = True
            log.error("no jobs are brought over: %s; trying again", error)

    def _look(self) -> None:
        """A carrier that has lost its queues: what lay there is called back.

        What is on its way lies nowhere for a moment, too, so one look tells nothing. If none was
        lost after all, no more comes of it than stale messages.
        """
        carried = {row.name: row.carried for row in self._store.stats() if row.carried}
        kept = {row.name for row in self._carrier.stats() if row.ready} if carried else set()
        missing = carried.keys() - kept
        self._missing = self._missing & missing if self._looks else missing
        self._looks = self._looks + 1 if self._missing else 0
        if self._looks >= LOOKS:
            count, names = sum(map(carried.__getitem__, self._missing)), sorted(self._missing)
            log.warning("the carrier has lost %d jobs of %s: they go to it once more", count, names)
            self._store.recall()
            self._looks = 0
        self._next_look = time.monotonic() + (LOOK_AGAIN if self._looks else LOOK_EVERY)
