"""Give leases to processes, and pass on the leases that a process has given back.

A job is *suspect* if its worker died while the job ran (``Lease.losses``): the job may have killed
the worker. A suspect job gets a process that runs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidemill.core.job import Lease, Verdict
from tidemill.worker.process import State, WorkerProcess, unstarted

if TYPE_CHECKING:
    from tidemill.worker.pool import ProcessPool


class Dispatch:
    """Gives leases to the processes of a pool."""

    def __init__(self, pool: ProcessPool) -> None:
        # Leases that a process gave back and that no other process has.
        self.spare: list[Lease] = []
        self.unwanted: set[int] = set()  # tokens of jobs that somebody wants cancelled
        self._pool = pool

    def room(self) -> int:
        """The number of further leases that all processes together would like to hold."""
        if self._single and self._has_suspect():
            return 0  # the suspect waits until the only process has ended its jobs
        return max(0, sum([process.room for process in self._pool.processes]) - len(self.spare))

    def deal(self, leases: list[Lease]) -> None:
        """Give leases to processes evenly.

        The leases first fill free slots. Then each process gets leases in advance, up to its depth,
        the most leases that it would like to hold.
        """
        if any(lease.losses for lease in leases):
            self.spare += [it for it in leases if it.losses and not self._isolate(it)]
            leases = [lease for lease in leases if not lease.losses]
        for process in self._pool.processes:
            if process.extra and not process.held and not self._has_suspect():
                process.be_quiet()
        if not leases:
            return
        processes = [process for process in self._pool.processes if process.room]
        if processes:
            _deal_out(leases, processes)
        else:
            # All processes with room went away while the worker asked for the leases.
            self.spare += leases

    def place_spare(self) -> list[Verdict]:
        """Give spare leases to processes with a free slot; send the rest back to the store."""
        back, kept = [], []
        for lease in self.spare:
            if lease.token in self.unwanted:  # the store then cancels the job
                self.unwanted.discard(lease.token)
                back.append(unstarted(lease.token))
            elif lease.losses and not self._pool.closing:
                if not self._isolate(lease):
                    kept.append(lease)
            elif free := [p for p in self._pool.processes if p.open and len(p.held) < p.slots]:
                min(free, key=lambda process: len(process.held)).give([lease])
            else:
                back.append(unstarted(lease.token))
        self.spare = kept
        return back

    def cancel_spare(self, token: int) -> bool:
        """Have the next step send a spare lease back to the store, which cancels its job."""
        if not any(lease.token == token for lease in self.spare):
            return False
        self.unwanted.add(token)
        return True

    def ended(self, verdicts: Iterable[Verdict]) -> None:
        if self.unwanted:
            self.unwanted.difference_update([verdict.token for verdict in verdicts])

    def forget(self) -> None:
        self.spare = []
        self.unwanted.clear()

    @property
    def can_isolate(self) -> bool:
        """True while this worker has no suspect job: a worker takes one suspect at a time."""
        alone = any(process.isolates for process in self._pool.processes)
        return not self._has_suspect() and not alone

    @property
    def _single(self) -> bool:
        return self._pool.slots == 1

    def _has_suspect(self) -> bool:
        return any(lease.losses for lease in self.spare)

    def _isolate(self, lease: Lease) -> bool:
        """Give the job a process that runs nothing else; False while there is none."""
        # The worker starts a process for the job, so that neither this job nor other jobs wait. A
        # worker with one slot starts no process, since it never runs two jobs at a time. Its only
        # process gets the job when no other job runs.
        processes = self._pool.processes
        for process in processes:
            serves = process.state is State.SERVING
            if serves and (process.extra or self._single) and not process.held:
                process.give([lease])
                return True
        waits = self._single or self._pool.held_back or self._pool.closing
        if not waits and not any(process.extra and process.staying for process in processes):
            self._pool.start_one(extra=True)
        return False


def _deal_out(leases: list[Lease], processes: list[WorkerProcess]) -> None:
    """Give the leases to processes in turn: a lease for each free slot first, then in advance."""
    hands: list[list[Lease]] = [[] for _ in processes]
    for most in ([p.slots for p in processes], [p.depth for p in processes]):
        leases = _deal_up_to(most, leases, processes, hands)
    for number, (process, hand) in enumerate(zip(processes, hands, strict=True)):
        hand += leases[number :: len(processes)]
        if hand:
            process.give(hand)


def _deal_up_to(
    most: list[int], leases: list[Lease], processes: list[WorkerProcess], hands: list[list[Lease]]
) -> list[Lease]:
    """Fill the hands until each process holds its ``most`` leases; return the leases left."""
    while leases:
        rooms = [
            (limit - len(process.held) - len(hand), hand)
            for limit, process, hand in zip(most, processes, hands, strict=True)
        ]
        rooms = [(room, hand) for room, hand in rooms if room > 0]
        if not rooms:
            break
        dealt = min([room for room, _ in rooms]) * len(rooms)
        for turn, (_, hand) in enumerate(rooms):
            hand += leases[turn : dealt : len(rooms)]
        leases = leases[dealt:]
    return leases
