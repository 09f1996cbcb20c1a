"""The timekeeper of a worker process: a thread that sends verdicts and ends overdue jobs.

The thread sleeps until somebody rings, or until the next deadline. While jobs run, the thread wakes
every 50 milliseconds. It shows a heartbeat, gives back jobs that wait too long, and reports the
number of leases to hold.
"""

from __future__ import annotations

import socket
from os import getpid
from typing import Protocol

from tidemill.core.clock import clock
from tidemill.core.job import Verdict
from tidemill.core.retry import JobTerminated
from tidemill.core.scoreboard import Scoreboard
from tidemill.worker import verdicts
from tidemill.worker.child_protocol import Down, MessageSocket, Setup, Up
from tidemill.worker.event_loop import Loop
from tidemill.worker.memory_limit import resident_memory
from tidemill.worker.outbox import Outbox
from tidemill.worker.prefetch import TICK, Prefetch
from tidemill.worker.run_log import RunLog
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.slots import Slots
from tidemill.worker.timeouts import Timeouts

log = SafeLog("tidemill.worker")


class TimekeeperHost(Protocol):
    """The parts of a worker process that its timekeeper uses."""

    @property
    def setup(self) -> Setup:
        """The settings of the process."""
        ...

    @property
    def socket(self) -> MessageSocket[Up, Down]:
        """The socket to the supervisor."""
        ...

    @property
    def out(self) -> Outbox:
        """Takes verdicts to the supervisor."""
        ...

    @property
    def slots(self) -> Slots:
        """The waiting jobs, and the slots."""
        ...

    @property
    def timeouts(self) -> Timeouts:
        """The running jobs."""
        ...

    @property
    def loop(self) -> Loop:
        """Runs the async jobs."""
        ...

    @property
    def scoreboard(self) -> Scoreboard:
        """Shows the heartbeat."""
        ...

    @property
    def run_log(self) -> RunLog:
        """Logs ended runs."""
        ...

    def quiet(self) -> None:
        """Start no more jobs, and end when the running jobs have ended."""
        ...

    def give_up(self, why: str, error: BaseException | None = None) -> None:
        """End the process at once: it cannot go on."""
        ...


class Timekeeper:
    """Sends the outbox, and does all that depends on time."""

    def __init__(self, host: TimekeeperHost) -> None:
        self._host = host
        self._prefetch = Prefetch(host.setup.concurrency)
        self.dozing = True  # True while the thread sleeps without a time limit
        # True when a signal, or a thread that cannot start, ends the process.
        self.told_to_go = False

    def serve(self) -> None:
        """Keep time until the process ends."""
        host, ticked = self._host, clock.machine()
        try:
            while True:
                host.out.sleep(self._next_look())
                now = clock.machine()
                if not host.loop.blocks(host.timeouts.running.values(), now):
                    # A heartbeat shows that a job can still end.
                    host.scoreboard.beat(host.setup.first_slot, now)
                if now - ticked >= TICK:
                    self._tick()
                    ticked = now
                if (self.told_to_go or not host.slots.budget) and not host.slots.quiet:
                    host.quiet()
                self._end_overdue()
                host.out.flush(wait=True)
                host.run_log.look(now)
                if host.slots.over or self._leave_if_done():
                    host.run_log.close()
                    return
        except BaseException as error:
            host.give_up("its timekeeper failed", error)

    def _next_look(self) -> float:
        """Seconds until the next look; -1 for no limit."""
        host = self._host
        self.dozing = True  # set before the check, so that a job that comes later rings
        deadline = host.timeouts.next_deadline()
        # A job that ended keeps ``active`` true for one more tick, which checks the memory.
        if deadline is None and not host.slots.active:
            summary = host.run_log.next_look(clock.machine())
            return -1 if summary is None else summary
        self.dozing = False
        return TICK if deadline is None else min(TICK, max(0.001, deadline - clock.machine()))

    def _tick(self) -> None:
        """Give back jobs that wait too long, and check the memory: every 50 ms while jobs run."""
        host = self._host
        finished, stalled = host.slots.tick()
        host.out.returned.extend(stalled)
        if not host.slots.running and not host.slots.waiting:
            host.timeouts.orders.clear()  # drop commands for jobs that had just ended
        if not finished:
            self._prefetch.nothing_ended(full=not host.slots.free)
        most = host.setup.max_memory
        if most and not host.slots.quiet and resident_memory() > most:
            log.info("process %d uses more than max_memory and is replaced", getpid())
            host.quiet()

    def _end_overdue(self) -> None:
        """Interrupt overdue jobs; report stuck ones, and have the process replaced."""
        host = self._host
        for run in host.timeouts.look(clock.machine()):
            trace = host.timeouts.stack_of(run)
            terminated = run.interrupted is JobTerminated
            host.out.stuck.append(
                verdicts.stuck(run.lease, run.envelope, trace, run.started, terminated)
            )
            host.quiet()

    def state(self, ended: list[Verdict]) -> tuple[int, bool]:
        """For a frame: the number of leases to hold in all, and True if the process leaves."""
        slots = self._host.slots
        if ended:
            self._prefetch.measure(ended)
        if slots.quiet:
            return 0, True
        wanted = self._host.setup.concurrency + self._prefetch.ahead
        return min(wanted, slots.budget + slots.running), False

    def _leave_if_done(self) -> bool:
        """After ``quiet``: end the process once no job runs and everything is sent."""
        host = self._host
        with host.out.sending:  # wait for a thread that is sending the last verdict
            done = host.slots.quiet and not host.slots.running
            if not done or not host.out.empty():
                return False
            host.slots.over = True
            try:
                # The closed socket wakes the thread that reads, and tells the supervisor of the
                # end.
                host.socket.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        host.slots.close()
        return True
