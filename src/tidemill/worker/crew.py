"""The processes of one worker: started, fed, watched, replaced; and what they report.

The supervisor asks how much they can take, deals leases to them, and fetches what they have to
settle. Which process lives or dies, and what becomes of the jobs it held, is decided here.
"""

from __future__ import annotations

import logging
import socket
import sys

from tidemill.app import Tidemill
from tidemill.clock import machine_time, wall_time
from tidemill.crash import point
from tidemill.job import Command, Lease, Note, Outcome, Verdict
from tidemill.worker.account import Account, unstarted
from tidemill.worker.dealing import deal_out
from tidemill.worker.hand import KILL_PATIENCE, Hand
from tidemill.worker.orphans import reap_orphans
from tidemill.worker.pool import Pool
from tidemill.worker.runner import stuck_verdict
from tidemill.worker.settings import Settings
from tidemill.worker.suspects import set_aside
from tidemill.worker.unknown import UNKNOWN, KnownTasks
from tidemill.worker.wire import Closed, Up

__all__ = ["Crew"]

log = logging.getLogger("tidemill.worker")

STUCK_MOST = 3
"""Stuck processes, for each process of the worker, that may wait for their neighbours at a time."""

DUMP_PATIENCE = 1.0
"""Seconds a process has to print its stacks itself."""

CRASH_BACKOFF_MOST = 30.0
CRASH_AGE = 2.0
"""A process that dies younger than this many seconds, running nothing, died of itself."""


class Crew(Pool):
    """All processes of a worker, and what they have said that is not settled yet."""

    def __init__(self, settings: Settings, name: str, folder: str, mill: Tidemill | None) -> None:
        super().__init__(settings, name, folder, mill)
        self.known = KnownTasks(settings.unknown_grace)
        self.verdicts: list[Verdict] = []
        self.sent: list[Verdict] = []  # in a step that the store has not answered
        self.notes: list[Note] = []
        self.spare: list[Lease] = []  # given back by one hand, not yet given to another
        self.interrupted = False  # something that ran was killed by the end of the worker
        self._ordered: set[int] = set()  # tokens somebody wants cancelled
        self._crashes = 0
        self._crashed_at = 0.0

    # -- dealing leases -------------------------------------------------------------------------

    def room(self) -> int:
        """How many more leases all would like to hold."""
        if self._single and self._lost():
            return 0  # the one process has to become empty first
        return max(0, sum([hand.room for hand in self.hands]) - len(self.spare))

    def deal(self, leases: list[Lease]) -> None:
        """Deal the leases: free slots first, evenly, then by how much each would like to hold."""
        if any(lease.losses for lease in leases):
            self.spare += [it for it in leases if it.losses and not self._isolate(it)]
            leases = [lease for lease in leases if not lease.losses]
        for hand in self.hands:
            if hand.extra and not hand.held and not self._lost():
                hand.be_quiet()
        if not leases:
            return
        hands = [hand for hand in self.hands if hand.room]
        if hands:
            deal_out(leases, hands)
        else:  # those who asked for them have gone meanwhile
            self.spare += leases

    def place_spare(self) -> list[Verdict]:
        """Give what was given back to a hand with a free slot; the rest goes back to the store."""
        back, kept = [], []
        for lease in self.spare:
            if lease.token in self._ordered:  # what somebody wants cancelled ends in the store
                self._ordered.discard(lease.token)
                back.append(unstarted(lease.token))
            elif lease.losses and not self.closing:
                if not self._isolate(lease):
                    kept.append(lease)
            elif free := [hand for hand in self.hands if hand.open and len(hand.held) < hand.slots]:
                min(free, key=lambda hand: len(hand.held)).give([lease])
            else:
                back.append(unstarted(lease.token))
        self.spare = kept
        return back

    # -- what may have brought a worker down ----------------------------------------------------

    @property
    def can_isolate(self) -> bool:
        """True while no job that must run alone is here: there is one at a time."""
        return not self._lost() and not any(hand.isolates for hand in self.hands)

    @property
    def _single(self) -> bool:
        return self.slots == 1

    def _lost(self) -> bool:
        return any(lease.losses for lease in self.spare)

    def _isolate(self, lease: Lease) -> bool:
        """Give the job a process that runs nothing else; False while there is none.

        One is started for it, so that nobody has to wait for it, nor it for others. But a worker
        with one slot promises that two jobs never run at a time.
        """
        for hand in self.hands:
            if (hand.extra or self._single) and hand.serving and not hand.held:
                hand.give([lease])
                return True
        waits = self._single or machine_time() < self._respawn_at
        if not waits and not any(hand.extra and hand.staying for hand in self.hands):
            self.start_one(extra=True)
        return False

    # -- listening ------------------------------------------------------------------------------

    def read(self, hand: Hand) -> None:
        """Hear what a hand has to say; it may be that it is gone. Never waits for its words."""
        try:
            for up in hand.line.receive(socket.MSG_DONTWAIT):
                self._hear(hand, up)
        except Closed:
            hand.closed_at = hand.closed_at or machine_time()
            if hand.exited(0.02):
                self._gone(hand)
            elif hand.running():  # it lives, and runs another program, say
                self.replace()

    def _read_all(self, hand: Hand) -> None:
        """Hear all that a hand has said by now."""
        for up in hand.line.drain():
            self._hear(hand, up)

    def _hear(self, hand: Hand, up: Up) -> None:
        self.news = True
        if up.hello is not None:
            self._greet(hand, up)
            return
        held = hand.held
        for verdict in up.verdicts:
            lease = held.pop(verdict.token, None)
            if lease is not None:
                if verdict.outcome == UNKNOWN:
                    verdict = self.known.judge(lease, verdict)
                self.verdicts.append(verdict)
        if self.closing and any(v.outcome == Outcome.RELEASE and v.started for v in up.verdicts):
            self.interrupted = True
        self.notes += up.notes
        for token in up.returned:
            lease = held.pop(token, None)
            if lease is not None and token not in hand.lost:
                self.spare.append(lease)
        if self._ordered and up.verdicts:
            self._ordered.difference_update([verdict.token for verdict in up.verdicts])
        hand.depth = up.depth
        for verdict in up.stuck:
            self._stuck(hand, verdict)
        if up.stacks:
            self._print_stacks(hand, up.stacks)
        hand.urgent = bool(hand.stuck)
        if up.leaving and not hand.leaving:
            hand.leaving = True
            self.replace()
        elif (hand.leaving or hand.quiet) and (self._full or self._rolls):
            self.slots_freed()

    def _greet(self, hand: Hand, up: Up) -> None:
        hand.hello = up.hello
        old, hand.replaces = hand.replaces, None
        if up.hello is None or not up.hello.error:
            if old is not None:
                old.be_quiet()
            return
        log.error("the app could not be loaded:\n%s", up.hello.error)
        if old is not None and old in self.hands:
            log.error("the processes with the code from before go on")
            hand.leaving = True
        else:
            self._crashed(hand)

    def obey(self, command: Command) -> None:
        """Cancel or terminate a job that one of them holds."""
        for hand in self.hands:
            if command.token in hand.held:
                self._ordered.add(command.token)
                hand.tell(command)
                return
        if any(lease.token == command.token for lease in self.spare):
            self._ordered.add(command.token)

    def lose(self) -> None:
        """All leases are others' now: none of them is started. Verdicts on them will be refused."""
        self.verdicts, self.notes, self.spare = [], [], []
        self._ordered.clear()
        for hand in self.hands:
            hand.lose()

    def reap(self) -> None:
        """Children have died: ours are buried in ``look_after``, those we inherited here."""
        for hand in self.hands:
            if hand.exited():  # its line may stay open: in what a task has forked
                hand.closed_at = hand.closed_at or machine_time()
        reap_orphans(self._reap_own)

    def _reap_own(self, pid: int) -> bool:
        hands = [hand for hand in self.hands if hand.pid == pid]
        return bool(hands and hands[0].exited()) or self._guard.reap(pid)

    # -- stuck and dead -------------------------------------------------------------------------

    def _stuck(self, hand: Hand, verdict: Verdict) -> None:
        """A job that nothing can interrupt. Its verdict falls; its process must go."""
        lease = hand.held.pop(verdict.token, None)
        if lease is None:
            return
        first, now = not hand.stuck, machine_time()
        hand.stuck.add(lease, verdict, now)
        hand.stuck.threads.update(row.thread for row in hand.rows((verdict.token,)))
        hand.urgent = True
        if first:
            reason = hand.stuck.reason
            log.warning("worker process %d is stuck and is replaced: %s", hand.pid, reason)
            hand.be_quiet()  # its clerk has stopped it, unless the interpreter lock is held
            self._bound_stuck()
            self.replace()
        # Its retry must not be runnable before the old run is dead, however long that takes: the
        # lease is held, and given back by ``_gone``.
        verdict.hold = True
        self.verdicts.append(verdict)

    def _bound_stuck(self) -> None:
        """End the process that has been stuck longest when there are too many for the memory."""
        stuck = [hand for hand in self.hands if hand.stuck and not hand.killed]
        if len(stuck) > STUCK_MOST * self.settings.processes:
            oldest = min(stuck, key=lambda hand: hand.stuck.since)
            log.warning("%d processes are stuck; the oldest is not waited for", len(stuck))
            self.end(oldest)

    def settled(self, verdicts: list[Verdict], shares: list[int]) -> None:
        """These are stored: what is stuck has used its attempt, and that no other."""
        stuck = {verdict.token for verdict in verdicts if verdict.hold}
        for hand in self.hands if stuck else ():
            if hand.stuck:
                hand.strike(stuck)
        self.shares.settled(shares)

    def strike_released(self) -> None:
        """Take jobs off the board that go back uncounted, as no step will say so."""
        verdicts = self.sent + self.verdicts
        released = {v.token for v in verdicts if v.outcome == Outcome.RELEASE}
        self.shares.strike(released)

    def look_after(self) -> None:
        """Find out who is stuck or dead, kill who must go, start who is missing."""
        now = machine_time()
        for hand in list(self.hands):
            if hand.timed or hand.stuck or hand.killed:
                self._read_all(hand)  # the supervisor may be inside the store for long
            self._look_at(hand, now)
        if self._respawn_at and now >= self._respawn_at:
            self._respawn_at = 0.0
            self.slots_freed()

    def _look_at(self, hand: Hand, now: float) -> None:
        hand.urgent = False
        if hand.killed_at:
            if hand.exited():
                self._gone(hand)
            elif hand.unkillable:
                self._give_back_interrupted(hand)
            elif now - hand.killed_at > KILL_PATIENCE:
                self._outlives(hand)
        elif hand.closed_at:
            if hand.abandon(now):
                self._gone(hand)
        else:
            if hand.timed or hand.doomed:
                self._witness(hand, now)
            if hand.stuck and hand.is_over(self.settings.stuck_grace, now):
                self.end(hand)
        if hand.dump_at and now >= hand.dump_at:
            self._print_stacks(hand, hand.stacks())

    def _witness(self, hand: Hand, now: float) -> None:
        """A process that cannot even say that it is stuck: a C call holds its interpreter lock."""
        rows = hand.overdue(now)
        stacks = hand.stacks(rows) if rows else ""
        for row in rows:
            lease = hand.held[row.token]
            trace = "Stacks of its jobs when it was given up:\n" + stacks
            terminated = row.token in hand.doomed
            self._stuck(hand, stuck_verdict(lease, lease.open(), trace, row.started, terminated))
        hand.timed = any(lease.timeout for lease in hand.held.values())

    def next_look(self, *, exact: bool = False) -> float:
        """Machine time at which something must be looked at that makes no noise by itself."""
        now, grace = machine_time(), self.settings.stuck_grace
        times = [hand.next_look(grace, now) for hand in self.hands]
        if exact:
            times += [at for hand in self.hands for at in hand.deadlines()]
        if self._respawn_at:
            times.append(self._respawn_at)
        return min(times, default=float("inf"))

    def end(self, hand: Hand) -> None:
        """Kill a process; what it held is settled once it is dead."""
        if hand.killed:
            return
        self._read_all(hand)
        reason = hand.stuck.reason
        log.warning("worker process %d is killed%s", hand.pid, f": {reason}" if reason else "")
        hand.kill()
        if hand.exited(0.02):
            self._gone(hand)

    def _outlives(self, hand: Hand) -> None:
        """A process is dead but for a system call that does not end: jobs in that stay held."""
        hand.note_unkillable(wall_time())
        self.news = True
        for token in sorted(hand.held.keys() - {row.token for row in hand.running()}):
            del hand.held[token]
            self.verdicts.append(unstarted(token))
        self._give_back_interrupted(hand)
        self.replace()
        log.error(
            "worker process %d does not die of SIGKILL (state %s): %d job(s) are held until it is "
            "gone; look for a dead mount or disk",
            hand.pid,
            hand.state(),
            len(hand.held) + len(hand.stuck.due),
        )

    def _give_back_interrupted(self, hand: Hand) -> None:
        """A process does not die: give back neighbours once their threads have ended."""
        if hand.killed and (rows := hand.interrupted()):
            self._read_all(hand)  # after the look at the threads: they say nothing more
            account = Account(hand, closing=self.closing)
            account.interrupt(rows)
            self._take(account)

    def _take(self, account: Account) -> None:
        self.verdicts += account.verdicts
        self.notes += account.notes
        self.interrupted = self.interrupted or (account.interrupted and self.closing)
        self._ordered.difference_update([verdict.token for verdict in account.verdicts])
        self.news = True

    def _gone(self, hand: Hand) -> None:
        """A process is dead. What it ran used an attempt, unless we killed it; the rest did not."""
        if hand not in self.hands:
            return
        for up in hand.line.rest():  # its last words may still be in the socket
            self._hear(hand, up)
        point("worker.burying")
        running = [row.token for row in hand.running()]
        suspected = set_aside(hand, running, self.spare, self.notes)
        account = Account(hand, closing=self.closing)
        account.close()
        self._take(account)
        self.hands.remove(hand)
        hand.bury()
        if self._mill is None:
            self._guard.remove(hand.pid)
        self.shares.retire(hand.first_slot)
        if hand.unkillable:
            log.info("worker process %d is dead at last", hand.pid)
        by_a_job = suspected or account.culprit
        failed = hand.hello is not None and hand.hello.error
        if not (failed or by_a_job or hand.killed or hand.leaving or hand.quiet):
            self._crashed(hand)
        self.slots_freed()

    def _crashed(self, hand: Hand) -> None:
        """Back off when processes die as fast as they are started."""
        now = machine_time()
        if now - hand.born > CRASH_AGE and hand.hello is not None and not hand.hello.error:
            log.error("%s", hand.cause())
            return
        self._crashes = self._crashes + 1 if now - self._crashed_at < CRASH_BACKOFF_MOST * 2 else 1
        self._crashed_at = now
        delay = min(CRASH_BACKOFF_MOST, 0.25 * 2.0 ** min(self._crashes, 10))
        self._respawn_at = now + delay
        log.error("a worker process ended right after its start; the next in %g s", delay)

    # -- ending ---------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True when no process is left but those that cannot be killed."""
        return all(hand.unkillable for hand in self.hands)

    def be_quiet(self) -> None:
        """All finish what runs, and go; nobody is replaced."""
        self.closing = True
        for hand in self.hands:
            hand.be_quiet()

    def end_all(self) -> None:
        """Kill all, and settle what they held; waits for their deaths, but not for ever."""
        self.closing = True
        hands = [hand for hand in self.hands if not hand.unkillable]
        for hand in hands:
            self.end(hand)
        until = machine_time() + KILL_PATIENCE
        for hand in hands:
            if hand not in self.hands:
                continue
            if hand.exited(max(0.001, until - machine_time())):
                self._gone(hand)
            else:
                self._outlives(hand)

    def dump(self) -> None:
        """Print the stacks of all processes: by themselves, or from outside if they cannot."""
        for hand in self.hands:
            hand.dump_at = machine_time() + DUMP_PATIENCE
            hand.tell(Command("dump"))

    @staticmethod
    def _print_stacks(hand: Hand, stacks: str) -> None:
        if hand.dump_at:
            hand.dump_at = 0.0
            sys.stderr.write(f"--- stacks of worker process {hand.pid}\n{stacks}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """The very end, however it came."""
        for hand in self.hands:
            hand.kill()
        for hand in self.hands:
            if hand.unkillable or not hand.exited(KILL_PATIENCE):
                log.error("worker process %d does not die; it is left behind", hand.pid)
            else:
                hand.bury()
        self._guard.close()
        if self.shares.board is not None:
            self.shares.board.remove()
