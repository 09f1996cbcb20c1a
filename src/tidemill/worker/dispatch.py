"""Which process gets which lease, and where leases go that a process has given back.

A job whose worker died while it ran is *suspect*: it may have brought the worker down
(``Lease.losses``). A suspect job gets a process that runs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidemill.core.job import Lease, Verdict
from tidemill.worker.lost_jobs import unstarted
from tidemill.worker.recycling import ProcessStarter
from tidemill.worker.worker_process import WorkerProcess

__all__ = ["Dispatch"]


class Dispatch:
    """Gives leases to the processes of a pool."""

    def __init__(self, pool: ProcessStarter) -> None:
        self.spare: list[Lease] = []  # given back by one process, not yet given to another
        self.unwanted: set[int] = set()  # tokens of jobs that somebody wants cancelled
        self._pool = pool

    def room(self) -> int:
        """How many more leases all processes would like to hold."""
        if self._single and self._has_suspect():
            return 0  # the only process has to become empty first
        return max(0, sum([process.room for process in self._pool.processes]) - len(self.spare))

    def deal(self, leases: list[Lease]) -> None:
        """Give leases to processes: free slots first, evenly, then by how much each would hold."""
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
        else:  # the processes that had room have gone meanwhile
            self.spare += leases

    def place_spare(self) -> list[Verdict]:
        """Give spare leases to processes with a free slot; the others go back to the store."""
        back, kept = [], []
        for lease in self.spare:
            if lease.token in self.unwanted:  # the store ends a job that is to be cancelled
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

    # -- cancelled and ended jobs ---------------------------------------------------------------

    def cancel_spare(self, token: int) -> None:
        """Send a spare lease back to the store, which cancels its job."""
        if any(lease.token == token for lease in self.spare):
            self.unwanted.add(token)

    def ended(self, verdicts: Iterable[Verdict]) -> None:
        """Forget that somebody wanted these jobs cancelled."""
        if self.unwanted:
            self.unwanted.difference_update([verdict.token for verdict in verdicts])

    def forget(self) -> None:
        """Drop all leases: other workers have them."""
        self.spare = []
        self.unwanted.clear()

    # -- suspect jobs ---------------------------------------------------------------------------

    @property
    def can_isolate(self) -> bool:
        """True while this worker has no suspect job: it takes one at a time."""
        alone = any(process.isolates for process in self._pool.processes)
        return not self._has_suspect() and not alone

    @property
    def _single(self) -> bool:
        return self._pool.slots == 1

    def _has_suspect(self) -> bool:
        return any(lease.losses for lease in self.spare)

    def _isolate(self, lease: Lease) -> bool:
        """Give the job a process that runs nothing else; False while there is none.

        A process is started for the job, so that neither the job nor others wait. But a worker with
        one slot promises that two jobs never run at a time.
        """
        processes = self._pool.processes
        for process in processes:
            if (process.extra or self._single) and process.serving and not process.held:
                process.give([lease])
                return True
        waits = self._single or self._pool.held_back
        if not waits and not any(process.extra and process.staying for process in processes):
            self._pool.start_one(extra=True)
        return False


def _deal_out(leases: list[Lease], processes: list[WorkerProcess]) -> None:
    """Give the leases to processes that have room."""
    if len(processes) == 1:
        processes[0].give(leases)
        return
    dealt: dict[int, list[Lease]] = {id(process): [] for process in processes}
    for process, lease in zip(_turns(processes, dealt), leases, strict=False):
        dealt[id(process)].append(lease)
    for process in processes:
        if dealt[id(process)]:
            process.give(dealt[id(process)])


def _turns(
    processes: list[WorkerProcess], dealt: dict[int, list[Lease]]
) -> Iterator[WorkerProcess]:
    """The processes for the next leases, without end."""
    for limits in ([p.slots for p in processes], [p.depth for p in processes]):
        with_room = list(zip(processes, limits, strict=True))
        while with_room:
            for process, limit in list(with_room):
                if len(process.held) + len(dealt[id(process)]) < limit:
                    yield process
                else:
                    with_room.remove((process, limit))
    while True:
        yield from processes
