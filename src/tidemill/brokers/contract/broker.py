"""The core of the contract: the nine calls by which jobs enter a broker, run, and end.

Calls are synchronous and thread-safe, and take batches. Each call is one atomic step: a kill in
the middle leaves either all of its effects or none. A broker keeps the laws of the features that
it lists. The caller refuses an option whose feature is missing, naming the feature.

An owner (a worker or a consumer) calls ``attach``, and then ``exchange`` and ``wait`` in turn.
``exchange`` hands in verdicts, takes leases, and never sleeps. ``wait`` sleeps until the next due
time, a hint, or a readable descriptor of the caller's. A hint may be wrong, since the store is the
truth: after each wake-up the owner exchanges again.

A broker over a network keeps three promises that a file cannot break:

- **Lost replies.** The broker repeats the call under the serial or nonce of the first attempt; the
  store answers a repeated call again and does not do it again. Without an answer the call raises
  ``BrokerUnavailable``: the step may have happened. The owner hands in the same verdicts and the
  same leases to take with its next step (:mod:`tidemill.brokers.network.repeated_calls`).
  ``exchange`` and ``wait`` raise soon, since a supervisor has deadlines to watch. ``put``,
  inspection and administration first wait for the server, up to the ``patience`` of the URL.
- **Leases of owners.** The store gives up an owner that it has not heard from for the length of
  the owner's lease. ``exchange`` renews the lease, so ``wait`` returns in time for the next one.
  A consumer is not given up while the ttr of a message that it holds runs.
- **Time** is the server's.

The other parts of the contract have a file each: :mod:`.inspection`, :mod:`.admin`,
:mod:`.schedules`, :mod:`.limits`, :mod:`.transfer`, :mod:`.job_waits`, :mod:`.carrier` and
:mod:`.remote_owners`. A :class:`~.store.Store` has all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature
from tidemill.core.job import Envelope, Owner, Put

__all__ = ["KEEP_ATTEMPTS", "SMALL_RESULT", "Broker"]

KEEP_ATTEMPTS = 20
"""The most attempts that a history lists, the latest ones. The counter goes on."""

SMALL_RESULT = 512
"""A result of so many bytes is kept however little room a store has."""


class Broker(Protocol):
    """Jobs enter, are leased to owners, and are settled."""

    url: str
    features: frozenset[Feature]

    @property
    def boards(self) -> str:
        """The folder on this machine for the scoreboards of owners.

        Empty when the broker has none: a worker then uses a temporary folder.
        """
        ...

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

        When the call returns, the jobs are kept (law 1). With ``txn`` the jobs exist if and only
        if the caller's transaction commits. When a call with a ``nonce`` accepted jobs, a call
        with the same nonce within 10 minutes gets the same answer and accepts nothing. A nonce has
        up to 100 characters; ids made by tidemill are best.

        A job that waits for others (``Links.waits``) counts the jobs that are put and name it as
        ``next``. The job is held back at least until the call that put it has put them all. Jobs
        in ``hold`` are held back until a later call names them in ``let_go``. ``max_size`` does
        not apply to a job that waits. Neither the job nor the jobs before it may have a key.

        Raises:
            DuplicateJob, QueueFull, StoreFull: nothing was stored.
            JobNotFound: a job named as ``next`` or in ``let_go`` does not exist or no longer waits.
        """
        ...

    def attach(self, owner: Owner) -> None:
        """List an owner as alive until it detaches, its process dies, or its lease passes.

        Raises:
            StoreMoved: the store departs; no owner works on it any more.
        """
        ...

    def detach(self, owner_id: str) -> None:
        """Take an owner off the list; jobs that it still holds go back and count no attempt."""
        ...

    def exchange(self, step: Step) -> Reply:
        """Note, settle, touch, take and lease, in that order, as one step. Never sleeps.

        - Jobs that have come due move first.
        - Leases may include jobs that were leased in the owner's name during its ``wait``. A reply
          never has more leases than the step wants.
        - An owner that was given up (``release``) has lost every lease. It gets the command
          ``lost`` and no leases, and may attach again.
        - Followers of a verdict are stored whatever ``max_size`` or the disk reserve say, since
          settling must not fail. A follower is left out when its id is taken or its key rejects it.
        - Nothing is taken from the carrier when the job's queue is paused or the store departs:
          the job goes back to its queue. An expired job ends as expired.
        """
        ...

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        """Sleep until a hint, a readable descriptor or the timeout; return readable descriptors.

        Returns at once if anything of interest happened since the owner's last exchange. The
        timeout should not exceed that exchange's ``next_due``. After the last wait the owner
        exchanges once more: otherwise a hint is lost, and a job that it announced stays ready.
        """
        ...

    def wake(self, owner_id: str) -> None:
        """Make the owner's wait return, from any thread."""
        ...

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Give back all jobs of a dead owner, take it off the list, and return their number.

        ``causes`` is a witness's account, by token. A job whose token is in ``causes`` was running:
        it used an attempt, and the cause is its error. Other jobs go back and count no attempt.
        None means that there was no witness: each job gets a loss, and each message a failed
        attempt.
        """
        ...

    def tick(self) -> float:
        """Release dead owners and prune; return the seconds until the next call is useful."""
        ...

    def close(self) -> None:
        """Free everything that this object holds. Idempotent."""
        ...
