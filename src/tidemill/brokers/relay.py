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
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tidemill.brokers.base import Broker, Feature, Mode, Step, Want
from tidemill.brokers.limiting import limiting
from tidemill.clock import new_id
from tidemill.crash import point
from tidemill.errors import (
    BrokerUnavailable,
    InvalidOption,
    StoreFull,
    StoreMoved,
    TidemillError,
)
from tidemill.job import RELAY, Envelope, Lease, Outcome, Owner, Verdict
from tidemill.retry import ENDLESS

__all__ = ["Brought", "Carrier", "InvalidMessage", "NoPlace", "Refused", "Relay", "unwrap"]

log = logging.getLogger("tidemill.relay")

BATCH = 500
"""Leases brought over at a time."""

_TRY_AGAIN = 1.0
"""Seconds, when one of the two is away."""

LOOK_EVERY, LOOK_AGAIN, LOOKS = 30.0, 2.0, 10
"""Seconds between two looks whether the carrier still has what was given to it, and between those
that follow one by which it has not; so many in a row must find that."""

OVERTAKEN = 60.0
"""Seconds by which one was leased later that came out of the same queue before another: that one is
lost, since who has it in hand uses it, or loses it, sooner."""

_SAMPLES = 10_000

_SNOOZE = 10.0
"""Seconds until a job is brought over once more for whose queue the carrier has no place."""

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


_Place = tuple[str, int, bool]


def _place(queue: str, lease: Lease) -> _Place:
    """Where the carrier brings one after the other in the order in which they came there."""
    return queue, lease.rank, lease.losses > 0


class Carrier(Broker, Protocol):
    """A broker that brings leases to its owners, who can be waited for beside something else."""

    def carry(self, jobs: Sequence[Envelope], alone: Collection[str]) -> None:
        """Publish jobs; those whose ids are in ``alone`` are brought one at a time.

        Raises:
            Refused: one of them can never be carried; those before it may be there.
            NoPlace: the queue of one of them cannot be made.
            InvalidOption: a queue has a name that cannot be.
            BrokerUnavailable, StoreFull: another try may do.
        """
        ...

    def bell(self, owner_id: str) -> int:
        """A descriptor that is readable when something came, once ``arm`` was called."""
        ...

    def arm(self, owner_id: str) -> bool:
        """Have the bell rung from now on; False when something has come already."""
        ...

    def disarm(self, owner_id: str) -> None:
        """Have it rung no more."""
        ...

    def doubt(self, owner_id: str, jobs: Sequence[Envelope], alone: Collection[str]) -> None:
        """These were carried: that there was nothing is no longer known."""
        ...


class Refused(BrokerUnavailable):
    """The carrier does not take a message, and never will."""


class NoPlace(BrokerUnavailable):
    """The carrier cannot make the queue for a message, as things are."""


class InvalidMessage(Exception):
    """What the carrier brought was never given to it by a relay."""


class Brought(NamedTuple):
    """What the carrier brought: its own token, and the lease of a job, with where it lay."""

    token: int
    queue: str
    id: str
    lease: Lease


def unwrap(brought: Lease) -> Brought:
    """The lease of a job, from what the carrier brought.

    Raises:
        InvalidMessage: it was put there by somebody else.
    """
    message = brought.open()
    if message.task != _TASK:
        raise InvalidMessage(
            "it was put without a store, and its workers have one: run a worker without store= "
            "for it, or use another prefix"
        )
    job_id, lease = message.id.partition("@")[2], _decode(message.body)
    return Brought(brought.token, message.queue, job_id, lease)


def hold_back(store: Broker) -> None:
    """Call back what is carried, if a breaker has stopped a queue of which some is."""
    if Feature.LIMITS not in store.features:
        return
    stopped = {
        row.name
        for row in limiting(store, "a breaker").limits()
        if row.queue and row.terms.breaker and row.failures >= row.terms.breaker[0]
    }
    if stopped and any(row.carried for row in store.stats() if row.name in stopped):
        store.recall()


class Relay:
    """The thread, and its owner."""

    def __init__(self, store: Broker, carrier: Carrier, owner: Owner) -> None:
        self._store = store
        self._carrier = carrier
        self._worker = owner.id
        self._queues = owner.queues
        self.owner = msgspec.structs.replace(owner, id=new_id(), kind=RELAY, board="")
        self._stopping = threading.Event()
        self._troubled = False
        self.quiet = False  # the store departs, and has said so
        self._behind = False  # the store may have lost steps of ours
        self._next_look = time.monotonic() + LOOK_EVERY
        self._missing: set[str] = set()  # queues of which the carrier had nothing, at each look
        self._looks = 0  # so many of them
        self._samples: deque[tuple[_Place, Lease, str]] = deque(maxlen=_SAMPLES)
        self._arrived: dict[_Place, float] = {}  # when the latest was leased that came from there
        self._failed = False  # an attempt has, since it last looked at breakers
        self._asked, self._looked = 0, 0  # the numbers of looks that were asked for, and done
        self._thread = threading.Thread(target=self._run, name="tidemill-relay", daemon=True)
        store.attach(self.owner)
        self._thread.start()

    def ask(self) -> int:
        """Have it look in the store, and wake the worker then: the number of that look."""
        self._asked += 1
        self._store.wake(self.owner.id)
        return self._asked

    def has_looked(self, number: int) -> bool:
        """Whether all that was there when it was asked is with the carrier."""
        return self._looked >= number

    def look_at_breakers(self) -> None:
        """Have it call back what is carried, if the failure of an attempt has stopped a queue."""
        self._failed = True
        self._store.wake(self.owner.id)

    def came(self, one: Brought) -> None:
        """What was carried has arrived, and was taken."""
        place = _place(one.queue, one.lease)
        self._arrived[place] = max(one.lease.leased, self._arrived.get(place, 0.0))

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
        # Looks may fail, and come first: nothing was leased in this turn that nobody would publish.
        if self._failed:
            self._failed = False
            hold_back(self._store)
        if time.monotonic() >= self._next_look:
            self._look_for_gaps()
            self._look()
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
            log.info("jobs are brought over again")
        if not self._stopping.is_set():
            left = max(0.0, self._next_look - time.monotonic())
            self._store.wait(self.owner.id, min(reply.next_due, left))
        return ()

    def _publish(self, leases: Sequence[Lease]) -> Sequence[Verdict]:
        """Give leases to the carrier: what became of each."""
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
        """One of these cannot be carried, and it holds up none but itself."""
        verdicts: list[Verdict] = []
        closed: dict[str, str] = {}  # queues that the carrier has no place for, and why
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
                why = f"it cannot be brought to a worker: {error}"
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
            log.error("no jobs are brought over: %s; trying again", error)

    def _look_for_gaps(self) -> None:
        """A carrier that has lost something, and goes on: what comes later arrives, and that not.

        Of each batch the last of each place is remembered. When one that was leased long after it
        has come from there, it was taken, or it can still be taken: then all is called back.
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
            log.warning("the carrier has lost some of %d jobs: they go to it once more", count)
        kept = [sample for sample in samples if sample not in passed]
        self._samples = deque(kept, maxlen=_SAMPLES)

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
