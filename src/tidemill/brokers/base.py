"""The broker seam: what a store must do, and nothing of how.

Small, synchronous, thread-safe. Every call is one atomic step: killed in the middle, it happened
wholly or not at all. Batches everywhere. A broker keeps the laws it claims in ``features``; what it
lacks is refused by name where the option is used.

The conversation of an owner is ``attach``, then ``exchange`` and ``wait`` in turn: an exchange
hands in verdicts and takes leases and never sleeps; a wait sleeps until the next due time, a hint,
or a descriptor of the caller's. Hints may lie, the store is the truth: whoever wakes exchanges
again.

A broker over a network keeps some promises that a file cannot break:

- A call whose reply was lost is repeated with the serial or nonce of the first, and answered, not
  done again. ``BrokerUnavailable`` is raised when it cannot be: a step that raised it may have
  happened; the owner hands in the same verdicts, and the same leases to take, again with its next
  step, which is answered for both (:mod:`.conversation`). ``exchange`` and ``wait`` raise it soon,
  since a supervisor has deadlines to look after meanwhile; ``put`` and the calls that look or act
  wait for the server to come back first, up to the ``patience`` of the URL.
- An owner that the store has not heard of for the length of its lease is given up. ``exchange``
  renews it, so ``wait`` returns in time for the next. A consumer is not given up while the ttr of a
  message it holds runs.
- Time is the server's.

A store may lend its jobs to a *carrier*, a message broker that brings them to the workers: it holds
what is ready, the store all else (``Feature.CARRY``). Some owner leases jobs in the ordinary way,
publishes each lease, and settles it ``Outcome.CARRY``: with its token it is the carrier's now, who
is no owner and never dies. The job is ready, but on no line, and nobody is told of it. Of a limit
it keeps its place, and the tokens that it takes when it starts: nobody else gets them until then,
so no more lie with the carrier than could start at once. Whoever gets the message hands in token
and id as ``Step.take``. Only when that is answered with True the lease is its own, as if made at
that moment, and the job may run; else the message is stale, and is dropped. So a job that was
published twice, or whose publisher died before it settled, runs once all the same. A message may
arrive before its lease was handed over: to take a lease from an owner of the kind ``relay`` hands
it over. What is done to a job that is ready is done to one that is carried: it then is with the
carrier no more, and its message is stale.

An owner may be *elsewhere*, on a machine that cannot open the store (``Feature.ELSEWHERE``): some
process here, a job server, makes its calls for it. It attaches with ``Owner.lease`` and belongs to
no process: when the server is killed, what it holds stays its own, and any process that has the
store open may make its next call; to attach it once more is to go on with it. Three things keep the
laws though a call, a reply or the server may be lost at any moment.

- Its steps bear serials. A step with the serial of the last one is a repetition: it is answered
  again, not done again, with those of its leases that still stand, and perhaps more that it still
  lacks. One with a lower serial came late, and is refused. A put bears a ``nonce``. So the caller
  repeats until it has an answer.
- Its word is its exchange. ``wait`` returns in time for the next, after a third of its lease. One
  that was silent for its lease is given up, and its jobs get a loss; but no consumer while the ttr
  of a message it holds runs. It is told ``lost``, as every owner that was given up. What another
  hands in for it (``Step.behalf``) is no word of its own.
- Silence is counted by those who hear (:meth:`Broker.count_silence`), so time in which it could not
  speak does not count: a server that was down, or stopped, or a machine that booted anew.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.brokers.looking import (
    Filter,
    Page,
    QueueStats,
    bad_cursor,
    matches,
    number_of,
    totals_of,
)
from tidemill.brokers.schedules import Schedule, Schedules
from tidemill.brokers.schemes import check_url, features_of, open_broker, register_scheme
from tidemill.brokers.steps import Mode, Reply, Step, Want
from tidemill.errors import FeatureMissing
from tidemill.job import DEFAULT_TTR, Command, Envelope, Owner, Put, Record

__all__ = [
    "DEFAULT_TTR",
    "KEEP_ATTEMPTS",
    "SMALL_RESULT",
    "Broker",
    "Departure",
    "Feature",
    "Filter",
    "Mode",
    "Page",
    "QueueStats",
    "Reply",
    "Step",
    "Want",
    "check_url",
    "features_of",
    "lacks",
    "bad_cursor",
    "matches",
    "number_of",
    "need",
    "open_broker",
    "register_scheme",
    "totals_of",
]

KEEP_ATTEMPTS = 20
"""Attempts a trail shows at most: the latest. The count goes on."""

SMALL_RESULT = 512
"""Bytes of a result that are kept however little room a store has."""


class Feature(enum.StrEnum):
    """What a broker may be able to do beyond put, lease and settle."""

    DURABLE = "durable"  # survives kill -9 of everything
    PROCESSES = "processes"  # several processes may share it
    IDS = "ids"  # an id of the user's own is taken once
    DELAY = "delay"
    PRIORITY = "priority"
    KEYS = "keys"
    UNIQUE = "unique"  # keys for a time: held by what has succeeded, replaced with an end
    RESULTS = "results"
    INSPECT = "inspect"
    FAILED = "failed"  # what failed can be looked for, kicked and deleted, if nothing else can
    CANCEL = "cancel"
    PAUSE = "pause"
    MAX_SIZE = "max_size"
    MERGED = "merged"  # Mode.MERGED: one order across queues
    TRANSACTIONS = "transactions"  # txn=
    BACKUP = "backup"
    FLOWS = "flows"  # jobs that wait for others: chains, groups, hooks
    MOVE = "move"  # all of it can go to another store, or come from one
    DRAIN = "drain"  # it only carries jobs: what it can comes from a store, or is taken out for one
    SCHEDULES = "schedules"  # records that come due, to be fired exactly once
    LIMITS = "limits"  # rates, windows, concurrency and breakers, of queues and of keys
    CARRY = "carry"  # leases may lie with a carrier, which brings them to whoever takes them
    NAMED = "named"  # a job can be leased by its id, and the first of each state be looked at
    UNKNOWN = "unknown"  # jobs of tasks that a worker does not know wait aside for one that does
    ELSEWHERE = "elsewhere"  # owners with a lease, serials and nonces: it can be served over HTTP


class Departure(msgspec.Struct, array_like=True, frozen=True):
    """That all of a store goes to another.

    Attributes:
        mark: tells this departure from every other.
        where: the url it goes to, as errors show it.
        last: the highest sequence ever drawn there.
        sealed: nothing at all changes there any more.
    """

    mark: str
    where: str
    last: int = 0
    sealed: bool = False


class Broker(Schedules, Protocol):
    """A store of jobs, and of schedules (:mod:`.schedules`)."""

    url: str
    features: frozenset[Feature]

    @property
    def boards(self) -> str:
        """A folder on this machine where an owner's board may lie.

        Empty when the broker has none: the worker then uses a temporary one.
        """
        ...

    # -- producing ------------------------------------------------------------------------------

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
        nonce: str = "",
    ) -> list[Put]:
        """Accept jobs, all or none, in order.

        When it returns they are kept (law 1); with ``txn`` they exist if and only if the caller's
        transaction commits. A call with a ``nonce`` (up to 100 characters; ids of our own are best)
        that accepted jobs is answered again when it is repeated within 10 minutes.

        A job that waits for others (``Links.waits``) counts those that are put and name it as
        ``next``. It is held back at least until the call that put it has put them all, and those in
        ``hold`` until a later call names them in ``let_go``. ``max_size`` does not hold for it, nor
        may it have a key, or what it follows have one.

        Raises:
            DuplicateJob, QueueFull, StoreFull: nothing was stored.
            JobNotFound: a job that is named as ``next`` or in ``let_go`` is not there, or waits for
                nothing more.
        """
        ...

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """Make an owner known, and alive until it detaches or its process dies, or it is silent.

        Raises:
            StoreMoved: the store departs; nobody works on it any more.
        """
        ...

    def detach(self, owner_id: str) -> None:
        """Take an owner off the list; what it still holds goes back uncounted."""
        ...

    def exchange(self, step: Step) -> Reply:
        """Note, settle, touch, take and lease, in that order, as one step. Never sleeps.

        What has come due moves first. The leases may also be such as were made in the owner's name
        while it was in its ``wait``; there are never more than are wanted now. An owner that was
        given up (``release``) meanwhile has lost everything: it gets no leases, and the command
        ``lost``; it may attach again. Followers of a verdict are stored whatever ``max_size`` or
        the reserve say, since settling must not fail; one whose id is taken, or whose key rejects
        it, is left out. Nothing is taken from the carrier of a queue that is paused, nor in a
        store that departs: such a job goes back to its line. One that has expired ends so.
        """
        ...

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        """Sleep until a hint, a readable descriptor or the timeout; returns the readable ones.

        Returns at once if anything of interest happened since the owner's last exchange. The
        timeout should not be beyond that exchange's ``next_due``. Exchange once more after the last
        wait: a hint not followed up is a job not taken.
        """
        ...

    def wake(self, owner_id: str) -> None:
        """Make the owner's wait return, from any thread."""
        ...

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Give back all that a dead owner held; returns how many jobs that were.

        ``causes`` is a witness's account: a token in it was running and used an attempt, with the
        cause as its error; the others go back uncounted. None means there was no witness: every job
        gets a loss instead, and every message a failed attempt. The owner is off the list
        afterwards.
        """
        ...

    def recall(self) -> int:
        """Give back all that lies with the carrier, uncounted; how many jobs those were.

        For when it has lost what it held. What it still brings is stale.
        """
        ...

    def tick(self) -> float:
        """Reap dead owners and prune; seconds until it matters again."""
        ...

    def count_silence(self) -> float:
        """Give up owners elsewhere that were silent for their lease; seconds until the next call.

        For a process that makes their calls, from where it hears them. What counts is the time from
        one call to the next in the same process; when that was more than twice as long as said,
        nobody could be heard, and all owners begin a whole lease anew.
        """
        ...

    # -- waiting for jobs -----------------------------------------------------------------------

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        """Sleep until all the jobs have finished or the time is over; the records as they stand.

        With ``first`` until one of them has. None stands for an id the store does not have, which
        counts as one that has finished.
        """
        ...

    def wait_space(self, queue: str, timeout: float) -> bool:
        """Sleep until the queue is below its ``max_size``; False when the time is over."""
        ...

    # -- inspecting -----------------------------------------------------------------------------

    def get(self, job_id: str) -> Record | None:
        """The record of a job, or None."""
        ...

    def was_here(self, job_id: str) -> bool:
        """True when an id the store does not have could be one it pruned: an own id, made since."""
        ...

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        """Records that match, newest first; a page may be short though more follow."""
        ...

    def stats(self) -> list[QueueStats]:
        """Every queue in numbers, by name."""
        ...

    def owners(self) -> list[Owner]:
        """The owners attached now."""
        ...

    def info(self) -> dict[str, Any]:
        """Facts about the store for ``tidemill info`` and ``doctor``."""
        ...

    # -- acting ---------------------------------------------------------------------------------
    # To do any of these twice is to do it once, if nobody does something else in between; but what
    # is said the second time is what there was left to do.

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        """Cancel: an unfinished job at once, a running one through its owner. False: too late."""
        ...

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        """Make failed, cancelled or expired jobs ready, as a new run, and scheduled ones.

        A new run counts its attempts from 1, so the backoff begins anew. A scheduled job goes on
        with its run.

        With ``force`` a job that succeeded runs again, too, unless it belongs to a flow; and a job
        whose key is held by a success (``Unique.period``) takes the key, up to the same time.

        A barrier (``Waits.BARRIER``) is never run: what failed before it is.
        """
        ...

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        """Forget jobs in any state; a running one loses its lease."""
        ...

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        """Change a queue's settings; None leaves one as it is."""
        ...

    def purge(self, queue: str) -> int:
        """Delete everything in the queue that is not running or finished; returns how many."""
        ...

    def forget_queue(self, queue: str) -> bool:
        """Forget the counters and settings of a queue; False when it has unfinished jobs.

        Its limit stays, and so do its finished jobs.
        """
        ...

    def command(self, owner_id: str, command: Command) -> bool:
        """Tell an owner something; False when it is not there."""
        ...

    def backup(self, target: str) -> None:
        """Copy the whole store to a new place while it is in use."""
        ...

    # -- moving to another store ----------------------------------------------------------------

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        """Accept, lease and change nothing more on anybody's wish: all goes to ``where``.

        What runs still ends as it will, and workers are told ``quiet``. ``seal`` stops the rest:
        timers and pruning. Called again it answers with the departure that has begun.

        Raises:
            StoreMoved: it is on its way somewhere else.
        """
        ...

    def stay(self) -> None:
        """Call a departure off."""
        ...

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        """Store jobs of a departed store as they are, and how far that went, as one step.

        They keep their order among themselves, and come behind what was here before. No bound
        applies. False: not stored, since the id, or the key, is taken here. No record is running.
        Then its schedules, but for their versions; False where the name is taken.
        """
        ...

    def adopted(self, mark: str) -> str:
        """The cursor of the last ``adopt`` of a departure; empty when there was none."""
        ...

    def close(self) -> None:
        """Give up everything this object holds. Idempotent."""
        ...


def need(broker: Broker, feature: Feature, option: str) -> None:
    """Refuse an option whose feature the broker lacks, naming both.

    Raises:
        FeatureMissing: it does.
    """
    if feature not in broker.features:
        raise lacks(broker.url, feature, option)


def lacks(url: str, feature: Feature, option: str) -> FeatureMissing:
    """The error for an option whose feature the broker of a URL lacks."""
    scheme = url.split("://", 1)[0]
    return FeatureMissing(
        f"{option} needs the feature {feature!s}, which {scheme}:// does not have"
    )
