"""The relay: it brings ready jobs of a store to a carrier, and hands their leases over.

Each worker runs a relay in a thread, as an owner of its own. The relay leases jobs in the ordinary
way and publishes the leases. When the carrier has confirmed the messages, the relay gives these
leases to the carrier. If the relay is killed in between, its leases go back like the leases of any
dead owner, and their jobs are published again. The earlier messages are stale: a worker cannot take
their leases from the store, and so does not run the jobs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tidemill.brokers.contract.exchange import Mode, Step, Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.store import Store
from tidemill.core.backoff import ENDLESS
from tidemill.core.clock import new_id
from tidemill.core.crash_points import point
from tidemill.core.envelope import Envelope
from tidemill.core.errors import (
    BrokerUnavailable,
    InvalidOption,
    StoreFull,
    StoreMoved,
    TidemillError,
)
from tidemill.core.job import Lease, Outcome, Verdict
from tidemill.core.owner import RELAY, Owner

log = logging.getLogger("tidemill.relay")

BATCH = 500
"""The most leases that the relay publishes at a time."""

_TRY_AGAIN = 1.0
"""Seconds between tries while store or carrier does not answer."""

LOOK_EVERY = 30.0
"""Seconds between two checks that the carrier still has its messages."""

LOOK_AGAIN, LOOKS = 2.0, 10
"""``LOOK_AGAIN``: seconds until the next check, after a check that found no message. ``LOOKS`` such
checks in a row prove that messages are lost."""

OVERTAKEN = 60.0
"""Seconds. A lease may be lost if a lease of the same sequence, made this much later, arrives
first. No worker holds a message so long before it takes the lease."""

_SAMPLES = 10_000

_SNOOZE = 10.0
"""Seconds until the next publish of a job when the carrier could not make the job's queue."""

_FAREWELL = 10.0
"""Seconds that a stopping relay has for its last step."""

_TASK = "tidemill.carried"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Lease).decode


def wrap(lease: Lease) -> Envelope:
    """A lease as a message: a job of its own, with endless retries."""
    job = lease.open()
    return Envelope(
        id=f"{lease.token}@{job.id}",
        queue=job.queue,
        task=_TASK,
        body=_encode(lease),
        rank=lease.rank,
        retries=ENDLESS,
    )


_Place = tuple[str, int, bool]


def _place(queue: str, lease: Lease) -> _Place:
    """The key of a sequence of messages that the carrier brings in order."""
    return queue, lease.rank, lease.losses > 0


class Carrier(Store, Protocol):
    """A broker that brings leases to its owners. An owner can wait for leases on a descriptor."""

    def carry(self, jobs: Sequence[Envelope], alone: Collection[str]) -> None:
        """Publish jobs; jobs whose ids are in ``alone`` are brought one at a time.

        Raises:
            Refused: a job can never be carried; the jobs before it may be published.
            NoPlace: the queue of a job cannot be made.
            InvalidOption: a queue has an impossible name.
            BrokerUnavailable, StoreFull: another try may succeed.
        """
        ...

    def wake_up_fd(self, owner_id: str) -> int:
        """A descriptor that becomes readable when a message comes after ``arm``."""
        ...

    def arm(self, owner_id: str) -> bool:
        """Signal the descriptor from now on; False when a message has come already."""
        ...

    def disarm(self, owner_id: str) -> None:
        """Stop signalling the descriptor."""
        ...

    def doubt(self, owner_id: str, jobs: Sequence[Envelope], alone: Collection[str]) -> None:
        """Let the owner check the queues of these jobs again: the relay published jobs there."""
        ...


class Refused(BrokerUnavailable):
    """The carrier never accepts this message."""


class NoPlace(BrokerUnavailable):
    """The carrier cannot make the queue for a message at present."""


class InvalidMessage(Exception):
    """A message that no relay published."""


class Brought(NamedTuple):
    """A message of the carrier: its token and queue, and the job's id and lease."""

    token: int
    queue: str
    id: str
    lease: Lease


def unwrap(brought: Lease) -> Brought:
    """The lease in a message of the carrier.

    Raises:
        InvalidMessage: another program published the message.
    """
    message = brought.open()
    if message.task != _TASK:
        raise InvalidMessage(
            "the message was put without store=, and this worker has store=: run a worker without "
            "store= for it, or use another prefix"
        )
    job_id, lease = message.id.partition("@")[2], _decode(message.body)
    return Brought(brought.token, message.queue, job_id, lease)


def hold_back(store: Store) -> None:
    """Recall all carried jobs if a breaker has stopped a queue with carried jobs."""
    if Feature.LIMITS not in store.features:
        return
    stopped = {
        row.name
        for row in with_limits(store, "a breaker").limits()
        if row.queue and row.terms.breaker and row.failures >= row.terms.breaker[0]
    }
    if stopped and any(row.carried for row in store.stats() if row.name in stopped):
        store.recall()


class Relay:
    """The relay of one worker: its thread, and its owner."""

    def __init__(self, store: Store, carrier: Carrier, owner: Owner) -> None:
        self._store = store
        self._carrier = carrier
        self._worker = owner.id
        self._queues = owner.queues
        self.owner = msgspec.structs.replace(owner, id=new_id(), kind=RELAY, board="")
        self._stopping = threading.Event()
        self._troubled = False
        self.quiet = False  # True while the jobs move to another store
        self._behind = False  # True when the store may have lost steps of the relay
        self._next_look = time.monotonic() + LOOK_EVERY
        self._missing: set[str] = set()  # queues without a message at each of the last checks
        self._looks = 0  # the number of these checks
        self._samples: deque[tuple[_Place, Lease, str]] = deque(maxlen=_SAMPLES)
        # The latest lease time of an arrived message, by sequence.
        self._arrived: dict[_Place, float] = {}
        self._failed = False  # True when an attempt failed since the last check of breakers
        self._asked, self._looked = 0, 0  # the numbers of checks asked for, and done
        self._thread = threading.Thread(target=self._run, name="tidemill-relay", daemon=True)
        store.attach(self.owner)
        self._thread.start()

    def ask(self) -> int:
        """Ask the relay to check the store and wake the worker; return the number of the check."""
        self._asked += 1
        self._store.wake(self.owner.id)
        return self._asked

    def has_looked(self, number: int) -> bool:
        """True when the carrier has all jobs that were ready at the request for this check."""
        return self._looked >= number

    def look_at_breakers(self) -> None:
        """Ask for a recall if the failure of an attempt has stopped a queue."""
        self._failed = True
        self._store.wake(self.owner.id)

    def came(self, one: Brought) -> None:
        """Record that a carried lease arrived and was taken."""
        place = _place(one.queue, one.lease)
        self._arrived[place] = max(one.lease.leased, self._arrived.get(place, 0.0))

    def stop(self) -> None:
        """End the thread, and give back leases that were not handed over."""
        self._stopping.set()
        with contextlib.suppress(BrokerUnavailable):
            self._store.wake(self.owner.id)
        self._thread.join(_FAREWELL)
        # If the detach fails, the leases go back when the relay is given up.
        with contextlib.suppress(BrokerUnavailable):
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
            except Exception:  # if this thread ended, its leases would stay
                if not self._stopping.is_set():
                    log.exception("the relay goes on after an error")
                    self._stopping.wait(_TRY_AGAIN)
        if verdicts:
            with contextlib.suppress(TidemillError):  # if this fails, the leases go back
                self._store.exchange(Step(self.owner.id, verdicts))

    def _turn(self, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
        """Hand over published leases, lease more jobs and publish these; return new verdicts."""
        # Checks come first, since they may fail: then this turn has not leased a job yet.
        if self._failed:
            self._failed = False
            hold_back(self._store)
        if time.monotonic() >= self._next_look:
            self._check_samples()
            self._check_queues()
        want, asked = Want(BATCH, self._queues, Mode.FAIR), self._asked
        held = [one.token for one in verdicts] if self._behind else None
        reply = self._store.exchange(Step(self.owner.id, verdicts, want, held=held))
        self._behind = reply.behind or bool(reply.strays)
        strays = [Verdict(token, Outcome.RELEASE) for token in reply.strays]
        told = {command.verb for command in reply.commands}
        if "lost" in told:
            self._store.attach(self.owner)
            return ()
        if self.quiet != ("quiet" in told):
            self.quiet = not self.quiet
            self._store.wake(self._worker)
        if reply.leases:
            point("relay.leased")
            return [*strays, *self._publish(reply.leases)]
        if self._behind:
            return strays
        if asked > self._looked:
            self._looked = asked
            self._store.wake(self._worker)
        if self._troubled:
            self._troubled = False
            log.info("the relay publishes jobs to the carrier again")
        if not self._stopping.is_set():
            left = max(0.0, self._next_look - time.monotonic())
            self._store.wait(self.owner.id, min(reply.next_due, left))
        return ()

    def _publish(self, leases: Sequence[Lease]) -> Sequence[Verdict]:
        """Publish leases to the carrier; return a verdict on each."""
        outcome = Outcome.CARRY
        try:
            self._carry(leases)
        except (Refused, NoPlace, InvalidOption):
            if len(leases) > 1:
                return self._publish_singly(leases)
            raise
        except TidemillError as error:
            self._say(error)
            outcome = Outcome.RELEASE
            self._stopping.wait(_TRY_AGAIN)
        point("relay.published")
        return [Verdict(lease.token, outcome) for lease in leases]

    def _publish_singly(self, leases: Sequence[Lease]) -> Sequence[Verdict]:
        """Publish leases one by one, so that a refused lease does not delay the other leases."""
        verdicts: list[Verdict] = []
        closed: dict[str, str] = {}  # queues that the carrier cannot make, each with the error
        for lease in leases:
            job, token = lease.open(), lease.token
            try:
                if job.queue not in closed:
                    verdicts += self._publish([lease])
                    continue
            except NoPlace as error:
                self._say(error)
                closed[job.queue] = str(error)
            except (Refused, InvalidOption) as error:
                log.error("job %s cannot be carried: %s", job.id, error)
                why = f"the carrier cannot bring the job to a worker: {error}"
                verdicts.append(Verdict(token, Outcome.FAIL, error=why))
                continue
            verdicts.append(Verdict(token, Outcome.SNOOZE, delay=_SNOOZE, error=closed[job.queue]))
        return verdicts

    def _carry(self, leases: Sequence[Lease]) -> None:
        jobs = [wrap(lease) for lease in leases]
        alone = {job.id for job, lease in zip(jobs, leases, strict=True) if lease.losses}
        self._carrier.carry(jobs, alone)
        self._carrier.doubt(self._worker, jobs, alone)
        ids = [job.id.partition("@")[2] for job in jobs]
        places = map(_place, [job.queue for job in jobs], leases)
        for place, n in {place: n for n, place in enumerate(places)}.items():
            self._samples.append((place, msgspec.structs.replace(leases[n], envelope=b""), ids[n]))

    def _say(self, error: Exception) -> None:
        if not self._troubled:
            self._troubled = True
            log.error("the relay publishes no jobs to the carrier: %s; trying again", error)

    def _check_samples(self) -> None:
        """Detect a carrier that lost some messages and goes on: only later messages arrive.

        The last lease of each sequence in each batch is a sample. When a much later lease of the
        sequence has arrived, the sample was taken, or its message is lost. If the sample can still
        be taken, its message is lost, and all carried leases are recalled.
        """
        arrived, samples = self._arrived, list(self._samples)
        passed = [s for s in samples if arrived.get(s[0], 0.0) > s[1].leased + OVERTAKEN]
        if not passed:
            return
        take = [(lease.token, job_id) for _, lease, job_id in passed]
        taken = self._store.exchange(Step(self.owner.id, take=take)).taken
        lost = [token for (token, _), mine in zip(take, taken, strict=False) if mine]
        if lost:
            back = [Verdict(token, Outcome.RELEASE) for token in lost]
            self._store.exchange(Step(self.owner.id, back))
            count = len(lost) + self._store.recall()
            log.warning("the carrier has lost some of %d jobs: all are published again", count)
        kept = [sample for sample in samples if sample not in passed]
        self._samples = deque(kept, maxlen=_SAMPLES)

    def _check_queues(self) -> None:
        """Detect a carrier that lost its queues, and recall their jobs.

        A message on its way lies in no queue for a moment, so one check proves nothing. A needless
        recall only makes messages stale.
        """
        carried = {row.name: row.carried for row in self._store.stats() if row.carried}
        kept = {row.name for row in self._carrier.stats() if row.ready} if carried else set()
        missing = carried.keys() - kept
        self._missing = self._missing & missing if self._looks else missing
        self._looks = self._looks + 1 if self._missing else 0
        if self._looks >= LOOKS:
            count, names = sum(map(carried.__getitem__, self._missing)), sorted(self._missing)
            log.warning("the carrier has lost %d jobs of %s: all are published again", count, names)
            self._store.recall()
            self._looks = 0
        self._next_look = time.monotonic() + (LOOK_AGAIN if self._looks else LOOK_EVERY)
