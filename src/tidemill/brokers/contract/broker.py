"""The core of the contract: the nine calls by which jobs enter a broker, run, and end.

Calls are synchronous and thread-safe, and take batches. Each call is atomic: after a kill, the
store has all effects of the call or none. A broker keeps the laws (``docs/laws.md``) of the
features that it lists. The caller refuses an option whose feature is missing; the error names the
feature.

An owner (a worker or a consumer) calls ``attach``, and then ``exchange`` and ``wait`` in turn.
``exchange`` hands in verdicts, takes leases, and never sleeps. ``wait`` sleeps until the next due
time, a hint, or until a descriptor of the caller is readable. A *hint* tells a sleeping owner that
the store may have a job for it. Only the store knows the state of a job: after each wake-up the
owner exchanges again.

A broker over a network also keeps three promises:

- **Lost replies.** The broker repeats the call under the serial or nonce of the first attempt; the
  store answers a repeated call again, but does not repeat its effects. Without an answer the call
  raises ``BrokerUnavailable``: the step may have happened. With its next step the owner hands in
  the same verdicts, and asks again for the leases that it wanted to take
  (:mod:`tidemill.brokers.network.repeated_calls`). ``exchange`` and ``wait`` raise soon, since a
  supervisor has deadlines to watch. ``put``, inspection and administration first wait for the
  server, up to the ``patience`` of the URL.
- **Leases of owners.** The store gives up an owner after a silence as long as the owner's lease.
  ``exchange`` renews the lease, so ``wait`` returns in time for the next ``exchange``. A consumer
  is not given up while the ttr (time to run) of one of its messages lasts.
- **Time** is the time of the server's clock.

The other parts of the contract are in :mod:`.inspection`, :mod:`.admin`, :mod:`.schedules`,
:mod:`.limits`, :mod:`.history` and :mod:`.transfer`. A :class:`~.store.Store` has all parts except
limits and history. For these two parts, call :func:`.limits.with_limits` and
:func:`.history.with_history`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner, Put, Verdict

KEEP_ATTEMPTS = 20  # the latest attempts in a job's history; the counter of attempts has them all
SMALL_RESULT = 512  # the size in bytes of a result that even a full store keeps


class Broker(Protocol):
    """Jobs enter, are leased to owners, and are settled."""

    url: str
    features: frozenset[Feature]

    @property
    def identity(self) -> str:
        """The identity of this store: the same for each URL of it, and for no other store."""
        ...

    @property
    def boards(self) -> str:
        """The folder on this machine for the scoreboards of owners.

        Empty when the broker has no such folder: a worker then uses a temporary folder.
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
        up to 100 characters; an id made by tidemill is a good nonce.

        A job with ``Links.waits`` waits for every job that is put with its id as ``next``. It also
        waits until the call has put all jobs of the call. Jobs in ``hold`` do not start until a
        later call names them in ``let_go``. ``max_size`` does not apply to a job that waits.
        Neither the job that waits nor the jobs for which it waits may have a key.

        Raises:
            DuplicateJob, QueueFull, StoreFull: nothing was stored.
            JobNotFound: a job named as ``next`` or in ``let_go`` does not exist or no longer waits.
        """
        ...

    def attach(self, owner: Owner) -> None:
        """List an owner as alive until the owner detaches, its process dies, or its lease ends.

        Raises:
            StoreMoved: the jobs move to another store, so no owner may attach to this store.
        """
        ...

    def detach(self, owner_id: str) -> None:
        """Take an owner off the list; its jobs go back to their queues and count no attempt."""
        ...

    def exchange(self, step: Step) -> Reply:
        """Store notes, settle, touch and lease, in this order, in one commit. Never sleeps.

        - Before all this, due jobs become ready.
        - Leases may include jobs that were leased in the owner's name during its ``wait``. A reply
          has at most as many leases as the step wants.
        - An owner that was given up (``release``) has lost every lease. The owner gets the command
          ``lost`` and no leases, and may attach again.
        - Jobs that a verdict puts (its followers) are stored even beyond ``max_size`` and the disk
          reserve, since settling must not fail. A follower whose id or key is taken is left out.
        """
        ...

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        """Sleep until a hint, a readable descriptor or the timeout; return readable descriptors.

        Returns at once if something for the owner has happened since its last exchange. The timeout
        should not exceed the ``next_due`` of the last exchange. After the last wait the owner
        exchanges once more. Without this exchange a hint is lost, and the job that the hint
        announced stays ready.
        """
        ...

    def wake(self, owner_id: str) -> None:
        """Make the owner's wait return, from any thread."""
        ...

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Give back all jobs of a dead owner, take it off the list, and return their number.

        A witness is a process that has read the scoreboard of the dead owner. ``causes`` is its
        report: the tokens of the jobs that were running, each with a cause. A job in the report
        used an attempt, and the cause is its error. Other jobs go back and count no attempt.
        Without a witness, ``causes`` is None: each job gets a loss (``Lease.losses``), and each
        message a failed attempt.
        """
        ...

    def tick(self) -> float:
        """Release dead owners and delete old jobs; return the seconds until the next call."""
        ...

    def close(self) -> None:
        """Free everything that this object holds. Idempotent."""
        ...


class CallerTransactions(Protocol):
    """A broker whose leases can end in a transaction of the caller (``Feature.TRANSACTIONS``)."""

    def settle_inside(self, owner_id: str, verdict: Verdict, txn: Any) -> bool:
        """End a lease if and only if the caller's transaction commits.

        False when the lease was lost: nothing changed, and the caller should roll back. The verdict
        has no followers.

        Raises:
            InvalidOption: ``txn`` is no open transaction of this store.
        """
        ...


class RemoteOwners(Protocol):
    """The part of the contract for owners on machines that cannot open the store.

    A *remote owner* (``Feature.REMOTE_OWNERS``) reaches the store through a job server, which makes
    the calls of the owner. The owner attaches with ``Owner.lease`` and belongs to no process of the
    store's machine. When the server is killed, a remote owner keeps its leases, and any process
    that has the store open may make the owner's next call. Attaching the same owner again continues
    its session.

    A call, a reply or the server may be lost at any moment. So three rules apply:

    - **Serials.** Each step of a remote owner has a serial. A step with the serial of the last step
      is a repetition: the store answers it again, but does not repeat its effects. The second
      answer has the leases of the first answer that the owner still holds, and perhaps new leases.
      A step with a lower serial came late and is refused. A put has a ``nonce`` instead of a
      serial. So the caller repeats a call until an answer comes.
    - **Sign of life.** Only an exchange shows that a remote owner lives. ``wait`` returns after a
      third of the lease, in time for the next exchange. The store gives up a remote owner that is
      silent for as long as its lease. Then its jobs get a loss, and its next call gets the command
      ``lost``. The store does not give up a consumer while the ttr (time to run) of one of its
      messages lasts. A step by another process for the owner (``Step.behalf``) is no sign of life.
    - **Silence** is counted by the process that makes the owner's calls
      (:meth:`RemoteOwners.count_silence`). Time in which this process, its server or its machine
      did not run does not count.
    """

    def count_silence(self) -> float:
        """Give up remote owners whose lease has passed; return the seconds until the next call.

        Called by the process that makes the owners' calls. Silence grows by the time between two
        calls of this method in the same process. When this time is more than twice the agreed
        interval, the process did not run and could hear no owner. Then every lease begins again.
        """
        ...
