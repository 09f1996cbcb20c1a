"""The supervisor: the only part of a worker that talks to the broker. It imports no user code.

It is the broker's *owner*: it leases jobs for all its processes, hands them out, collects their
verdicts, and knows, when one dies, what it was running. That the conversation is here and not in the
processes has a reason: a store step made from a process whose threads compute, or hold the
interpreter lock in a C call, would keep every other process out of the store for as long.

    exchange ──► hand out ──► wait (broker, processes, signals, deadlines) ──► collect ──► exchange …
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator

import msgspec

from tidemill.app import Tidemill
from tidemill.board import Board
from tidemill.brokers.base import Broker, Mode, Reply, Step, Want, open_broker
from tidemill.clock import machine_time, new_id, wall_time
from tidemill.errors import BrokerUnavailable, FeatureMissing, InvalidOption, StoreFull
from tidemill.job import Command, Lease, Note, Outcome, Owner, Verdict
from tidemill.worker.hand import Hand
from tidemill.worker.runner import timed_out
from tidemill.worker.wire import Closed, Setup, Up

__all__ = ["Settings", "Supervisor"]

log = logging.getLogger("tidemill.worker")

WITNESS_PATIENCE = 0.55
"""Seconds past a deadline after which a process that says nothing is taken to be stuck."""

CRASH_BACKOFF_MOST = 30.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is to be. Durations are seconds, ``max_memory`` is bytes."""

    app: str = ""
    processes: int = 1
    concurrency: int = 8
    queues: tuple[str, ...] = ()
    mode: Mode = Mode.FAIR
    burst: bool = False
    drain: float = 5.0
    shutdown_timeout: float = 30.0
    max_jobs: int = 0
    max_memory: int = 0
    name: str = ""


class Supervisor:
    """One worker: some processes, one owner."""

    def __init__(self, settings: Settings, mill: Tidemill | None = None) -> None:
        """With ``mill`` the jobs run in threads of this process and no process is spawned."""
        self.settings = settings
        self._mill = mill
        self.owner = Owner(
            id=new_id(),
            name=settings.name or f"{socket.gethostname()}:{os.getpid()}",
            host=socket.gethostname(),
            pid=os.getpid(),
            started=wall_time(),
            queues=settings.queues,
            concurrency=settings.concurrency * settings.processes,
        )
        self._folder = tempfile.mkdtemp(prefix="tidemill-")
        # Twice the room: a process that drains keeps its slots while its replacement has its own.
        regions = settings.processes * 2 + 2
        self._regions = [n * settings.concurrency for n in range(regions)]
        self._board = Board(os.path.join(self._folder, "board"), regions * settings.concurrency)
        self.owner.board = self._board.path
        self.hands: list[Hand] = []
        self._verdicts: list[Verdict] = []
        self._notes: list[Note] = []
        self._spare: list[Lease] = []  # given back by one hand, not yet given to another
        self._stopping = 0.0  # machine time at which a graceful stop ends; 0 while serving
        self._killed = False  # something running was interrupted by the shutdown
        self._respawn_at = 0.0
        self._crashes = 0
        self._reload = False
        self._signals: list[int] = []
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self.broker: Broker | None = None
        self._load_error = ""
        self._asked = 0

    # -- life -----------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to stop; the exit code: 0 clean, 1 jobs were interrupted, 2 the app could
        not be loaded, 3 the broker could not be reached."""
        try:
            return self._run()
        except (BrokerUnavailable, FeatureMissing, InvalidOption) as error:
            log.error("%s", error)
            return 3 if isinstance(error, BrokerUnavailable) else 2
        finally:
            for hand in self.hands:
                hand.kill()
                hand.bury()
            if self._mill is None and self.broker is not None:
                self.broker.close()
            self._board.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._wake_read.close()
            self._wake_write.close()

    def _run(self) -> int:
        if not self._start():
            log.error("the app %s could not be loaded:\n%s", self.settings.app, self._load_error)
            return 2
        assert self.broker is not None
        self.broker.attach(self.owner)
        log.info(
            "worker %s serves %s with %d × %d",
            self.owner.name,
            ", ".join(self.settings.queues) or "all queues",
            self.settings.processes,
            self.settings.concurrency,
        )
        try:
            while not self._done():
                self._turn()
        finally:
            self._settle_rest()
            self.broker.detach(self.owner.id)
        log.info("worker %s is done%s", self.owner.name, ", jobs were interrupted" if self._killed else "")
        return 1 if self._killed else 0

    def _start(self) -> bool:
        """The first process tells where the broker is: only it has the app."""
        self._add_hand()
        if self._mill is not None:
            self.broker = self._mill.broker
        while self.broker is None:
            hand = self.hands[0]
            self._await(hand)
            if hand.hello is None or hand.hello.error:
                self._load_error = hand.hello.error if hand.hello else hand.cause()
                return False
            self.broker = open_broker(hand.hello.url)
        for _ in range(self.settings.processes - 1):
            self._add_hand()
        return True

    def _await(self, hand: Hand) -> None:
        while hand.hello is None:
            try:
                for up in hand.line.receive():
                    self._hear(hand, up)
            except Closed:
                hand.kill()
                return

    def _add_hand(self) -> None:
        region = self._regions.pop()
        hand = Hand(self._board, region, self.settings.concurrency)
        setup = Setup(
            app=self.settings.app,
            concurrency=self.settings.concurrency,
            queues=self.settings.queues if self.settings.mode is Mode.STRICT else (),
            board=self._board.path,
            board_slots=self._board.slots,
            first_slot=region,
            stacks=os.path.join(self._folder, f"stacks-{region}"),
            max_jobs=self.settings.max_jobs,
            max_memory=self.settings.max_memory,
        )
        if self._mill is not None:
            hand.run_here(self._mill, setup)
        else:
            hand.spawn(setup)
        hand.line.sock.setblocking(True)
        self.hands.append(hand)

    # -- one turn -------------------------------------------------------------------------------

    def _turn(self) -> None:
        reply = self._exchange()
        for command in reply.commands:
            self._obey(command)
        self._hand_out(reply.leases)
        if self.settings.burst and self._dry(reply):
            self._stop_softly()
        timeout = min(reply.next_due, self._patience())
        self._collect(timeout)
        self._look_after()

    def _exchange(self) -> Reply:
        assert self.broker is not None
        verdicts, self._verdicts = self._verdicts, []
        notes, self._notes = self._notes, []
        room = 0 if self._stopping else sum(hand.room for hand in self.hands) - len(self._spare)
        self._asked = max(0, room)
        want = Want(self._asked, self.settings.queues, self.settings.mode)
        verdicts += [Verdict(lease.token, Outcome.RELEASE) for lease in self._unplaced()]
        try:
            return self.broker.exchange(Step(self.owner.id, verdicts, want, notes=notes))
        except (BrokerUnavailable, StoreFull) as error:
            log.error("%s; trying again", error)
            self._verdicts, self._notes = verdicts + self._verdicts, notes + self._notes
            return Reply(next_due=1.0)

    def _unplaced(self) -> list[Lease]:
        """Leases given back that no other hand has a slot for: they go back to the store."""
        while self._spare and (hand := self._roomiest()) is not None:
            hand.give([self._spare.pop(0)])
        left, self._spare = self._spare, []
        return left

    def _roomiest(self) -> Hand | None:
        """A serving hand with a free slot."""
        free = [hand for hand in self.hands if hand.serving and len(hand.held) < hand.slots]
        return min(free, key=lambda hand: len(hand.held), default=None)

    def _hand_out(self, leases: list[Lease]) -> None:
        """Deal the leases: free slots first, evenly, then by how much each would like to hold."""
        if not leases:
            return
        hands = [hand for hand in self.hands if hand.room]
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
        for limit in (lambda hand: hand.slots, lambda hand: hand.depth):
            open_hands = list(hands)
            while open_hands:
                for hand in list(open_hands):
                    if len(hand.held) + len(dealt[id(hand)]) < limit(hand):
                        yield hand
                    else:
                        open_hands.remove(hand)
        while True:
            yield from hands

    def _dry(self, reply: Reply) -> bool:
        """Nothing came and nothing is in hand: the end of a burst."""
        started = bool(self.hands) and all(hand.depth for hand in self.hands)
        busy = any(hand.held for hand in self.hands) or self._verdicts or self._spare
        return started and self._asked > 0 and not busy and not reply.leases

    # -- collecting -----------------------------------------------------------------------------

    def _collect(self, timeout: float) -> None:
        assert self.broker is not None
        by_fd = {hand.fileno(): hand for hand in self.hands}
        fds = [*by_fd, self._wake_read.fileno()]
        ready = self.broker.wait(self.owner.id, max(0.0, timeout), fds)
        for fd in ready:
            hand = by_fd.get(fd)
            if hand is not None:
                self._read(hand)
            else:
                self._take_signals()

    def _read(self, hand: Hand) -> None:
        try:
            for up in hand.line.receive():
                self._hear(hand, up)
        except Closed:
            self._gone(hand)

    def _hear(self, hand: Hand, up: Up) -> None:
        if up.hello is not None:
            hand.hello = up.hello
            return
        held = hand.held
        for verdict in up.verdicts:
            if held.pop(verdict.token, None) is not None:
                self._verdicts.append(verdict)
        self._notes += up.notes
        for token in up.returned:
            lease = held.pop(token, None)
            if lease is not None:
                self._spare.append(lease)
        hand.depth = up.depth
        if up.depth:
            self._crashes = 0
        for verdict in up.stuck:
            self._stuck(hand, verdict)
        if up.leaving and not hand.leaving:
            hand.leaving = True
            if not hand.quiet and not hand.stuck:
                self._replace()  # it goes by itself: recycled

    # -- stuck, dead, replaced ------------------------------------------------------------------

    def _stuck(self, hand: Hand, verdict: Verdict) -> None:
        """A job that nothing in its process can interrupt. Its verdict falls; its process must go."""
        if hand.held.pop(verdict.token, None) is None:
            return
        first = not hand.stuck
        hand.stuck.add(verdict.token)
        now = machine_time()
        if first:
            neighbours = [row for row in hand.running() if row.token in hand.held]
            hand.kill_at = now + self.settings.drain if neighbours else now
            log.warning("worker process %d is stuck and is replaced", hand.pid)
            self._replace()
        # Not runnable before its old run is dead.
        verdict.delay = max(verdict.delay, hand.kill_at - now + (0.5 if hand.kill_at > now else 0.0))
        if hand.kill_at <= now:
            self._end(hand)
        self._verdicts.append(verdict)

    def _witness(self, hand: Hand) -> None:
        """A process that cannot even say that it is stuck: a C call holds its interpreter lock."""
        for token in hand.overdue(WITNESS_PATIENCE):
            lease = hand.held[token]
            started = next((row.started for row in hand.running() if row.token == token), 0.0)
            trace = "Stacks of all threads when it was given up:\n" + hand.stacks()
            self._stuck(hand, timed_out(lease, lease.open(), trace, started))

    def _end(self, hand: Hand) -> None:
        """Kill a process and settle what it held."""
        hand.kill()
        self._gone(hand)

    def _gone(self, hand: Hand) -> None:
        """A process is dead. What it ran used an attempt, unless we killed it; the rest did not."""
        if hand not in self.hands:
            return
        hand.reap()
        with contextlib.suppress(Closed):  # its last words may still be in the socket
            hand.line.sock.setblocking(False)
            while True:
                got = list(hand.line.receive())
                for up in got:
                    self._hear(hand, up)
                if not got:
                    break
        running = {row.token: row.started for row in hand.running()}
        expected = hand.killed or hand.leaving or hand.quiet
        cause, now = hand.cause(), wall_time()
        for token in hand.held:
            if token in running and not hand.killed:
                log.warning("%s while running a job", cause)
                self._verdicts.append(
                    Verdict(token, Outcome.RETRY, error=cause, started=running[token], ended=now)
                )
            else:
                self._verdicts.append(Verdict(token, Outcome.RELEASE))
                self._killed = self._killed or (token in running and bool(self._stopping))
        hand.held.clear()
        self.hands.remove(hand)
        hand.bury()
        self._regions.append(hand.first_slot)
        if not expected:
            if hand.hello is not None and hand.hello.error:
                log.error("the app could not be loaded:\n%s", hand.hello.error)
            self._crashed(hand)
            self._replace()

    def _crashed(self, hand: Hand) -> None:
        """Back off when processes die as fast as they are started."""
        if machine_time() - hand.born < 1.0:
            self._crashes += 1
            delay = min(CRASH_BACKOFF_MOST, 0.5 * 2.0 ** min(self._crashes, 10))
            self._respawn_at = machine_time() + delay
            log.error("%s right after its start; the next is started in %g s", hand.cause(), delay)

    def _replace(self) -> None:
        """Bring the number of serving processes back up, unless we are stopping."""
        serving = [h for h in self.hands if not (h.quiet or h.leaving or h.stuck or h.killed)]
        missing = self.settings.processes - len(serving)
        if self._stopping or machine_time() < self._respawn_at:
            return
        for _ in range(min(missing, len(self._regions))):
            self._add_hand()

    # -- looking after them ---------------------------------------------------------------------

    def _patience(self) -> float:
        """Seconds until something must be looked at that makes no noise by itself."""
        now = machine_time()
        times = [hand.kill_at for hand in self.hands]
        if self._stopping:
            times.append(self._stopping)
        if self._respawn_at > now:
            times.append(self._respawn_at)
        for hand in self.hands:
            if any(lease.timeout for lease in hand.held.values()):
                # Boards are written silently: while jobs with a timeout are out, look now and then.
                times.append(now + 0.25)
                times += [r.deadline + WITNESS_PATIENCE for r in hand.running() if r.deadline]
        return max(0.0, min(times, default=now + 3600.0) - now)

    def _look_after(self) -> None:
        now = machine_time()
        for hand in list(self.hands):
            if not hand.stuck and any(lease.timeout for lease in hand.held.values()):
                self._witness(hand)
            if hand.stuck and hand in self.hands:
                neighbours = [row for row in hand.running() if row.token in hand.held]
                if now >= hand.kill_at or not neighbours:
                    self._end(hand)
            if hand.hello is not None and hand.hello.error and hand in self.hands:
                self._gone(hand)
        if self._respawn_at and now >= self._respawn_at:
            self._respawn_at = 0.0
            self._replace()
        if self._reload:
            self._reload = False
            self._roll()
        if self._stopping and now >= self._stopping:
            for hand in list(self.hands):
                self._end(hand)

    def _roll(self) -> None:
        """Replace all processes: the old ones finish what they run, the new ones load the new code."""
        log.info("reloading")
        for hand in self.hands:
            hand.be_quiet()
        self._replace()

    def _obey(self, command: Command) -> None:
        if command.verb in ("cancel", "terminate"):
            for hand in self.hands:
                if command.token in hand.held:
                    hand.tell(command)
        elif command.verb == "quiet":
            for hand in self.hands:
                hand.be_quiet()
            self._stopping = self._stopping or float("inf")
        elif command.verb == "stop":
            self._stop_softly()
        elif command.verb == "dump":
            self._dump()

    # -- stopping -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask for a graceful stop, from any thread."""
        self._signals.append(signal.SIGTERM)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def on_signal(self, signum: int, frame: object) -> None:
        """The handler of all our signals: note it and wake the loop."""
        self._signals.append(signum)
        self._wake()

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        signals, self._signals = self._signals, []
        for signum in signals:
            if signum in (signal.SIGTERM, signal.SIGINT) and not self._stopping:
                self._stop_softly()
            elif signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
                log.warning("stopping now; what still runs goes back")
                self._stopping = self._stopping or machine_time()
                for hand in list(self.hands):
                    self._end(hand)
            elif signum == signal.SIGHUP:
                self._reload = True
            elif signum == signal.SIGUSR1:
                self._dump()

    def _stop_softly(self) -> None:
        if self._stopping:
            return
        if not self.settings.burst:
            log.info("stopping: up to %g s for what runs", self.settings.shutdown_timeout)
        self._stopping = machine_time() + self.settings.shutdown_timeout
        for hand in self.hands:
            hand.be_quiet()

    def _dump(self) -> None:
        for hand in self.hands:
            sys.stderr.write(f"--- stacks of worker process {hand.pid}\n{hand.stacks()}\n")

    def _done(self) -> bool:
        return bool(self._stopping) and not self.hands

    def _settle_rest(self) -> None:
        """The last verdicts, whatever it was that ended the loop."""
        for hand in list(self.hands):
            self._end(hand)
        if self._verdicts or self._notes or self._spare:
            self._exchange()


def install(supervisor: Supervisor) -> Callable[[], None]:
    """Route this process's signals to the supervisor; returns what undoes it."""
    wanted = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1)
    before = {signum: signal.signal(signum, supervisor.on_signal) for signum in wanted}

    def undo() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    return undo
