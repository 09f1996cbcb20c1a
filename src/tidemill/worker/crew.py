"""The processes of one worker: started, fed, watched, replaced; and what they report.

The supervisor asks how much they can take, deals leases to them, and fetches what they have to
settle. Which process lives or dies, and what becomes of the jobs it held, is decided here.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

from tidemill.app import Tidemill
from tidemill.board import Board
from tidemill.brokers.base import Mode
from tidemill.clock import machine_time, wall_time
from tidemill.crash import point
from tidemill.job import NOT_STARTED, Command, Lease, Note, Outcome, Verdict
from tidemill.worker.guard import Guard
from tidemill.worker.hand import Hand
from tidemill.worker.orphans import reap_orphans
from tidemill.worker.runner import stuck_verdict
from tidemill.worker.settings import Settings
from tidemill.worker.wire import Closed, Setup, Up

__all__ = ["Crew"]

log = logging.getLogger("tidemill.worker")

CRASH_BACKOFF_MOST = 30.0
CRASH_AGE = 2.0
"""A process that dies younger than this many seconds, running nothing, died of itself."""


class Crew:
    """All processes of a worker, and what they have said that is not settled yet."""

    def __init__(self, settings: Settings, name: str, folder: str, mill: Tidemill | None) -> None:
        self.settings = settings
        self.hands: list[Hand] = []
        self.verdicts: list[Verdict] = []
        self.notes: list[Note] = []
        self.spare: list[Lease] = []  # given back by one hand, not yet given to another
        self.closing = False  # nobody is replaced any more
        self.interrupted = False  # something that ran was killed by the end of the worker
        self._name = name
        self._folder = folder
        self._mill = mill
        # Twice the room: a process that drains keeps its slots while its replacement has its own.
        regions = settings.processes * 2 + 2
        self._regions = [n * settings.concurrency for n in range(regions)]
        self._board_slots = regions * settings.concurrency
        self.board: Board | None = None
        self._guard = Guard()
        self._ordered: set[int] = set()  # tokens somebody wants cancelled
        self._respawn_at = 0.0  # machine time; 0 when no start is held back
        self._crashes = 0
        self._crashed_at = 0.0

    # -- starting -------------------------------------------------------------------------------

    def start_one(self, replaces: Hand | None = None, *, extra: bool = False) -> Hand | None:
        """Start a process; None when the system has no room for one now."""
        settings = self.settings
        region = self._regions.pop()
        hand = Hand(region, settings.concurrency, extra=extra)
        hand.board = self.board
        hand.replaces = replaces
        setup = self._setup(region)
        point("worker.spawning")
        try:
            if self._mill is not None:
                hand.run_here(self._mill, setup)
            else:
                hand.spawn(setup)
                self._guard.add(hand.pid)
        except OSError as error:
            log.error("cannot start a worker process: %s; trying again", error)
            self._regions.append(region)
            self._respawn_at = machine_time() + 1.0
            return None
        point("worker.spawned")
        self.hands.append(hand)
        return hand

    def _setup(self, region: int) -> Setup:
        settings = self.settings
        return Setup(
            app=settings.app,
            concurrency=settings.concurrency,
            queues=settings.queues if settings.mode is Mode.STRICT else (),
            board=self.board.path if self.board is not None else "",
            board_slots=self._board_slots,
            first_slot=region,
            stacks=os.path.join(self._folder, f"stacks-{region}"),
            worker=self._name,
            slots=settings.concurrency * settings.processes,
            max_jobs=settings.max_jobs,
            max_memory=settings.max_memory,
        )

    def open_board(self, owner_id: str, folder: str) -> str:
        """Make the board, in the broker's folder if it has one, and show it to who is here."""
        self.board = Board(os.path.join(folder or self._folder, owner_id), self._board_slots)
        self.board.claim(owner_id)
        for hand in self.hands:
            hand.introduce(self.board, self._setup(hand.first_slot))
        return self.board.path

    def replace(self) -> None:
        """Bring the number of processes back up, unless all is ending or starts are held back."""
        if self.closing or machine_time() < self._respawn_at:
            return
        staying = sum(hand.staying and not hand.extra for hand in self.hands)
        missing = self.settings.processes - staying
        for _ in range(min(missing, len(self._regions))):
            if self.start_one() is None:
                return

    def roll(self) -> None:
        """Replace all processes: each goes once another has loaded the new code."""
        log.info("reloading")
        outgoing = [hand.replaces for hand in self.hands]
        for hand in [h for h in self.hands if h.staying and not h.extra and h not in outgoing]:
            if not self._regions or self.start_one(hand) is None:
                hand.be_quiet()
        self.replace()

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
        if not hands:  # who asked for them has gone meanwhile
            self.spare += leases
            return
        if len(hands) == 1:
            hands[0].give(leases)
            return
        dealt: dict[int, list[Lease]] = {id(hand): [] for hand in hands}
        rest = iter(leases)
        for hand, lease in zip(self._seats(hands, dealt), rest, strict=False):
            dealt[id(hand)].append(lease)
        for hand in hands:
            if dealt[id(hand)]:
                hand.give(dealt[id(hand)])

    @staticmethod
    def _seats(hands: list[Hand], dealt: dict[int, list[Lease]]) -> Iterator[Hand]:
        """Whom to give the next lease, without end."""
        for limits in ([hand.slots for hand in hands], [hand.depth for hand in hands]):
            open_hands = list(zip(hands, limits, strict=True))
            while open_hands:
                for hand, limit in list(open_hands):
                    if len(hand.held) + len(dealt[id(hand)]) < limit:
                        yield hand
                    else:
                        open_hands.remove((hand, limit))
        while True:
            yield from hands

    def place_spare(self) -> list[Verdict]:
        """Give what was given back to a hand with a free slot; the rest goes back to the store."""
        back, kept = [], []
        for lease in self.spare:
            if lease.token in self._ordered:  # what somebody wants cancelled ends in the store
                self._ordered.discard(lease.token)
                back.append(_unstarted(lease.token))
            elif lease.losses and not self.closing:
                if not self._isolate(lease):
                    kept.append(lease)
            elif free := [hand for hand in self.hands if hand.open and len(hand.held) < hand.slots]:
                min(free, key=lambda hand: len(hand.held)).give([lease])
            else:
                back.append(_unstarted(lease.token))
        self.spare = kept
        return back

    # -- what may have brought a worker down ----------------------------------------------------

    @property
    def can_isolate(self) -> bool:
        """True while no job that must run alone is here: there is one at a time."""
        return not self._lost() and not any(hand.isolates for hand in self.hands)

    @property
    def _single(self) -> bool:
        return self.settings.processes * self.settings.concurrency == 1

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
        waits = self._single or machine_time() < self._respawn_at or not self._regions
        if not waits and not any(hand.extra and hand.staying for hand in self.hands):
            self.start_one(extra=True)
        return False

    # -- listening ------------------------------------------------------------------------------

    def read(self, hand: Hand) -> None:
        """Hear what a hand has to say; it may be that it is gone."""
        try:
            for up in hand.line.receive():
                self._hear(hand, up)
        except Closed:
            hand.closed_at = machine_time()
            if hand.exited(0.02):
                self._gone(hand)

    def _hear(self, hand: Hand, up: Up) -> None:
        if up.hello is not None:
            self._greet(hand, up)
            return
        held = hand.held
        for verdict in up.verdicts:
            if held.pop(verdict.token, None) is not None:
                self.verdicts.append(verdict)
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
        if up.leaving and not hand.leaving:
            hand.leaving = True
            self.replace()

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
        if hand.held.pop(verdict.token, None) is None:
            return
        first = not hand.stuck
        now = machine_time()
        hand.stuck[verdict.token] = now + verdict.delay
        if first:
            hand.kill_at = now + self.settings.drain if hand.neighbours() else now
            log.warning("worker process %d is stuck and is replaced", hand.pid)
            self.replace()
        # Its retry must not be runnable before the old run is dead, however long that takes: the
        # lease is held, and given back by ``_gone``.
        verdict.hold = True
        self.verdicts.append(verdict)

    def settled(self) -> None:
        """All verdicts are stored: what is stuck has used its attempt, and that no other."""
        for hand in self.hands:
            if hand.stuck:
                hand.strike_stuck()

    def look_after(self) -> None:
        """Find out who is stuck or dead, kill who must go, start who is missing."""
        now = machine_time()
        for hand in list(self.hands):
            if hand.closed_at:
                if hand.abandon(now):
                    self._gone(hand)
                continue
            if hand.timed or hand.doomed:
                self._witness(hand, now)
            if hand.stuck and (now >= hand.kill_at or not hand.neighbours()):
                self.end(hand)
        if self._respawn_at and now >= self._respawn_at:
            self._respawn_at = 0.0
            self.replace()

    def _witness(self, hand: Hand, now: float) -> None:
        """A process that cannot even say that it is stuck: a C call holds its interpreter lock."""
        for row in hand.overdue(now):
            lease = hand.held[row.token]
            trace = "Stacks of all threads when it was given up:\n" + hand.stacks()
            terminated = row.token in hand.doomed
            self._stuck(hand, stuck_verdict(lease, lease.open(), trace, row.started, terminated))
        hand.timed = any(lease.timeout for lease in hand.held.values())

    def next_look(self) -> float:
        """Seconds until something must be looked at that makes no noise by itself."""
        now = machine_time()
        times = [hand.next_look(now) for hand in self.hands]
        if self._respawn_at:
            times.append(self._respawn_at)
        return max(0.0, min(times, default=now + 3600.0) - now)

    def end(self, hand: Hand) -> None:
        """Kill a process and settle what it held."""
        log.warning("worker process %d is killed", hand.pid)
        hand.kill()
        self._gone(hand)

    def _gone(self, hand: Hand) -> None:
        """A process is dead. What it ran used an attempt, unless we killed it; the rest did not."""
        for up in hand.line.rest():  # its last words may still be in the socket
            self._hear(hand, up)
        point("worker.burying")
        running = {row.token: row.started for row in hand.running()}
        cause, now, culprit = hand.cause(), wall_time(), False
        for token in hand.held:
            if token in running and not hand.killed:
                culprit = True
                log.warning("%s while running a job", cause)
                self.verdicts.append(
                    Verdict(token, Outcome.RETRY, error=cause, started=running[token], ended=now)
                )
            elif token in running:
                why = "its worker was stopped" if self.closing else "another job there was stuck"
                after = f"after {now - running[token]:.3f} s"
                self.notes.append(Note(token, line=f"interrupted {after}: {why}", time=now))
                self.verdicts.append(Verdict(token, Outcome.RELEASE, started=running[token]))
                self.interrupted = self.interrupted or self.closing
            else:
                self.verdicts.append(_unstarted(token))
        for token, due in hand.stuck.items():
            delay = max(0.0, due - machine_time())
            self.verdicts.append(Verdict(token, Outcome.RELEASE, delay=delay))
        self._ordered.difference_update(hand.held)
        hand.held.clear()
        self.hands.remove(hand)
        hand.bury()
        if self._mill is None:
            self._guard.remove(hand.pid)
        self._regions.append(hand.first_slot)
        failed = hand.hello is not None and hand.hello.error
        if not (failed or culprit or hand.killed or hand.leaving or hand.quiet):
            self._crashed(hand)
        self.replace()

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

    def be_quiet(self) -> None:
        """All finish what runs, and go; nobody is replaced."""
        self.closing = True
        for hand in self.hands:
            hand.be_quiet()

    def end_all(self) -> None:
        """Kill all, and settle what they held."""
        self.closing = True
        for hand in list(self.hands):
            self.end(hand)

    def dump(self) -> None:
        """Print the stacks of all threads of all processes."""
        for hand in self.hands:
            sys.stderr.write(f"--- stacks of worker process {hand.pid}\n{hand.stacks()}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """The very end, however it came."""
        for hand in self.hands:
            hand.kill()
            hand.bury()
        self._guard.close()
        if self.board is not None:
            self.board.remove()


def _unstarted(token: int) -> Verdict:
    """Give back what never ran; somebody may have cancelled it meanwhile."""
    return Verdict(token, Outcome.RELEASE, error=NOT_STARTED)
