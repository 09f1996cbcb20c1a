"""The relay: it brings what is ready in a store to a carrier, and hands the leases over.

One runs in each worker, an owner of its own, in a thread. It leases in the ordinary way, publishes
what it leased, and only when the carrier has confirmed that, the leases are the carrier's. Killed
in between, they go back as those of any dead owner do, and are published once more; the messages
that were out by then are stale, since whoever gets one takes the lease by its token before it runs
anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import msgspec

from tidemill.brokers.base import Broker, Mode, Step, Want
from tidemill.clock import new_id
from tidemill.errors import BrokerUnavailable, StoreFull, StoreMoved, TidemillError
from tidemill.job import RELAY, Envelope, Lease, Outcome, Owner, Verdict
from tidemill.retry import ENDLESS

__all__ = ["Relay", "unwrap"]

log = logging.getLogger("tidemill.relay")

BATCH = 500
"""Leases brought over at a time."""

_TRY_AGAIN = 1.0
"""Seconds, when one of the two is away."""

_LOOK_EVERY = 30.0
"""Seconds between two looks whether the carrier still has what was given to it."""

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


def unwrap(brought: Lease) -> tuple[str, Lease]:
    """The id of the job, and its lease, from what the carrier brought."""
    message = brought.open()
    return message.id.partition("@")[2], _decode(message.body)


class Relay:
    """The thread, and its owner."""

    def __init__(self, store: Broker, carrier: Broker, owner: Owner) -> None:
        self._store = store
        self._carrier = carrier
        self._queues = owner.queues
        self.owner = msgspec.structs.replace(owner, id=new_id(), kind=RELAY, board="")
        self._stopping = False
        self._troubled = False
        self._missing = False  # the carrier had nothing of what it should have, at the last look
        self._busy = threading.Event()
        self._busy.set()
        self._thread = threading.Thread(target=self._run, name="tidemill-relay", daemon=True)
        store.attach(self.owner)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether it brings something over, or has not looked yet."""
        return self._busy.is_set()

    def stop(self) -> None:
        """End, and give back what was not handed over."""
        self._stopping = True
        try:
            self._store.wake(self.owner.id)
            self._thread.join(10.0)
            self._store.detach(self.owner.id)
        except BrokerUnavailable:
            pass  # its leases go back when it is given up

    # -- its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        verdicts: Sequence[Verdict] = ()
        while not self._stopping:
            try:
                verdicts = self._turn(verdicts)
            except (BrokerUnavailable, StoreFull, StoreMoved) as error:
                self._say(error)
                time.sleep(_TRY_AGAIN)
            except TidemillError as error:
                if self._stopping:
                    return
                log.error("the relay: %s", error)
                time.sleep(_TRY_AGAIN)

    def _turn(self, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
        """Hand over what was published, lease more, publish that: what came of it."""
        want = Want(BATCH, self._queues, Mode.FAIR)
        reply = self._store.exchange(Step(self.owner.id, verdicts, want))
        if any(command.verb == "lost" for command in reply.commands):
            self._store.attach(self.owner)
            return ()
        if reply.leases:
            self._busy.set()
            return self._publish(reply.leases)
        self._busy.clear()
        if self._troubled:
            self._troubled = False
            log.info("jobs are brought over again")
        before = time.monotonic()
        self._store.wait(self.owner.id, min(reply.next_due, _LOOK_EVERY))
        if time.monotonic() - before >= _LOOK_EVERY / 2:
            self._look()
        return ()

    def _publish(self, leases: Sequence[Lease]) -> Sequence[Verdict]:
        outcome = Outcome.CARRY
        try:
            self._carrier.put([wrap(lease) for lease in leases])
        except (BrokerUnavailable, StoreFull) as error:
            self._say(error)
            outcome = Outcome.RELEASE
            time.sleep(_TRY_AGAIN)
        return [Verdict(lease.token, outcome) for lease in leases]

    def _say(self, error: Exception) -> None:
        if not self._troubled:
            self._troubled = True
            log.error("no jobs are brought over: %s; trying again", error)

    def _look(self) -> None:
        """A carrier that has lost its queues: what lay there is called back.

        Two looks, half a minute apart, lest something on its way be taken for lost; if it was not,
        no more comes of it than a stale message.
        """
        carried = sum(row.carried for row in self._store.stats())
        missing = bool(carried) and not any(row.ready for row in self._carrier.stats())
        if missing and self._missing:
            log.warning("the carrier has lost %d jobs: they are brought to it once more", carried)
            self._store.recall()
            missing = False
        self._missing = missing
