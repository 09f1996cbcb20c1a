"""The supervisor: the only part of a worker that talks to the broker. It imports no user code.

It is the broker's *owner*: it leases jobs for all its processes (:mod:`.crew`), hands them out,
collects their verdicts, and knows, when one dies, what it was running. That the conversation is
here and not in the processes has a reason: a store step made from a process whose threads compute,
or hold the interpreter lock in a C call, would keep every other process out of the store as long.

    exchange ──► hand out ──► wait (broker, processes, signals, deadlines) ──► collect ──► …
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable

from tidemill.app import Tidemill
from tidemill.brokers.base import Broker, Feature, Reply, Step, Want, need, open_broker
from tidemill.clock import machine_time, new_id, wall_time
from tidemill.config import storable
from tidemill.crash import point
from tidemill.errors import (
    BrokerUnavailable,
    FeatureMissing,
    InvalidOption,
    StoreFull,
    StoreMoved,
    TidemillError,
)
from tidemill.job import Command, Outcome, Owner, Verdict
from tidemill.worker.crew import Crew
from tidemill.worker.firing import Firing
from tidemill.worker.folder import Folder
from tidemill.worker.settings import Settings

__all__ = ["Settings", "Supervisor", "install"]

log = logging.getLogger("tidemill.worker")

CLEAN, INTERRUPTED, UNUSABLE, UNREACHABLE = 0, 1, 2, 3
"""Exit codes."""

RETRY_AFTER = 1.0
"""Seconds between two tries to reach a broker that is away."""

ON_ITS_WAY, ON_ITS_WAY_MOST = 0.1, 1.0
"""Seconds until one looks, at the end of a burst, whether what is on its way has arrived: at first
and as it goes on."""

SAME_SIGNAL = 0.2
"""Seconds within which a second TERM or INT is the first: process managers signal a worker and its
group."""

_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1),
    signal.SIGCHLD,
)


class Supervisor:
    """One worker: some processes, one owner."""

    def __init__(self, settings: Settings, mill: Tidemill | None = None) -> None:
        """With ``mill`` the jobs run in threads of this process and no process is spawned."""
        self.settings = settings
        self._mill = mill
        self._folder = Folder()
        name = settings.name or f"{socket.gethostname()}:{os.getpid()}"
        self.crew = Crew(settings, name, self._folder.path, mill)
        self.owner = Owner(
            id=new_id(),
            name=name,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=wall_time(),
            queues=settings.queues,
            concurrency=settings.concurrency * settings.processes,
        )
        self.broker: Broker | None = None
        self._firing = Firing(settings.app, self.owner.id)
        self._stopping = 0.0  # machine time at which a graceful stop ends; 0 while serving
        self._asked = 0
        self._again = ON_ITS_WAY
        self._troubled = False  # the broker is away, and it has been said
        self._signals: list[int] = []
        self._told_at = 0.0  # machine time of the first TERM or INT
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    # -- life -----------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to stop; returns the exit code.

        0 clean, 1 jobs were interrupted, 2 the app could not be loaded, 3 the broker could not be
        reached.
        """
        try:
            return self._run()
        except (BrokerUnavailable, FeatureMissing, InvalidOption, StoreMoved) as error:
            log.error("%s", error)
            return UNREACHABLE if isinstance(error, BrokerUnavailable) else UNUSABLE
        finally:
            self.crew.close()
            if self._mill is None and self.broker is not None:
                self.broker.close()
            self._folder.remove()
            self._wake_read.close()
            self._wake_write.close()

    def _run(self) -> int:
        if self._mill is not None:
            broker = self._mill.broker
            self.owner.board = self.crew.open_board(self.owner.id, broker.boards)
        elif self.crew.start_one() is None:
            return UNUSABLE
        else:
            code = self._await_first()
            if code is not None:
                return code
            hello = self.crew.hands[0].hello
            assert hello is not None
            broker = open_broker(hello.url)
            need(broker, Feature.PROCESSES, "a worker of its own")
            self.owner.board = self.crew.open_board(self.owner.id, broker.boards)
        self.broker = broker
        self.crew.replace()
        broker.attach(self.owner)
        log.info(
            "worker %s serves %s of %s with %d x %d",
            self.owner.name,
            ", ".join(self.settings.queues) or "all queues",
            broker.url,
            self.settings.processes,
            self.settings.concurrency,
        )
        try:
            while not (self._stopping and not self.crew.hands):
                self._turn(broker)
        finally:
            self.crew.end_all()
            self._exchange(broker)
            with contextlib.suppress(BrokerUnavailable):  # it will notice that we are gone
                broker.detach(self.owner.id)
        interrupted = self.crew.interrupted
        log.info(
            "worker %s is done%s", self.owner.name, ", jobs were interrupted" if interrupted else ""
        )
        return INTERRUPTED if interrupted else CLEAN

    def _await_first(self) -> int | None:
        """The first process tells where the broker is, who alone has the app; or an exit code."""
        hand = self.crew.hands[0]
        while True:
            self._select([hand.fileno()], 3600.0)
            if self._stopping:
                return CLEAN
            if hand.hello is not None and hand.hello.error:
                return UNUSABLE
            if hand not in self.crew.hands or hand.closed_at:
                log.error("the app %s could not be loaded", self.settings.app)
                return UNUSABLE
            if hand.hello is not None:
                return None

    def _select(self, fds: list[int], timeout: float) -> None:
        ready, _, _ = select.select([*fds, self._wake_read.fileno()], [], [], timeout)
        self._take(ready)

    # -- one turn -------------------------------------------------------------------------------

    def _turn(self, broker: Broker) -> None:
        self._declare(broker)
        reply = self._exchange(broker)
        point("worker.exchanged")
        self._fire(broker, reply)
        self.crew.deal(reply.leases)
        point("worker.handed")
        for command in reply.commands:
            self._obey(broker, command)
        if self.settings.burst:
            self._end_burst(broker, reply)
        self._collect(broker, min(reply.next_due, self._next_look()))
        self.crew.look_after()
        if self._stopping and machine_time() >= self._stopping:
            self.crew.end_all()
        point("worker.collected")

    def _declare(self, broker: Broker) -> None:
        """Store the schedules of the app, as the latest of its processes has loaded it."""
        hellos = [hand.hello for hand in self.crew.hands if hand.hello is not None]
        if hellos and not hellos[-1].error and not self._stopping:
            try:
                self._firing.declare(broker, hellos[-1])
            except BrokerUnavailable as error:
                self._trouble(error)

    def _fire(self, broker: Broker, reply: Reply) -> None:
        """See to the schedules that are due, and look at once for what they put."""
        if reply.schedules:
            reply.next_due = 0.0
            try:
                self._firing.fire(broker, reply.schedules, reply.wall)
            except BrokerUnavailable as error:
                self._trouble(error)
                reply.next_due = RETRY_AFTER

    def _exchange(self, broker: Broker) -> Reply:
        crew = self.crew
        self._asked = 0 if self._stopping else crew.room()
        settings = self.settings
        want = Want(self._asked, settings.queues, settings.mode, alone=crew.can_isolate)
        verdicts = crew.place_spare()
        crew.verdicts += verdicts
        verdicts, crew.verdicts = crew.verdicts, []
        notes, crew.notes = crew.notes, []
        fires = 0 if self._stopping else self._firing.count(broker)
        step = Step(self.owner.id, verdicts, want, notes=notes, fires=fires)
        try:
            reply = broker.exchange(step)
        except BrokerUnavailable as error:
            self._trouble(error)
            crew.verdicts, crew.notes = verdicts + crew.verdicts, notes + crew.notes
            self._asked = 0  # of nobody: that nothing came says nothing
            return Reply(next_due=RETRY_AFTER)
        except Exception as error:
            if not (verdicts or notes or isinstance(error, StoreFull)):
                raise
            log.error("a step was refused: %s; its verdicts are handed in one by one", error)
            self._asked = 0
            reply = Reply(next_due=RETRY_AFTER)
            for verdict in verdicts:
                said = self._settle_alone(broker, verdict)
                reply.leases += said.leases
                reply.commands += said.commands
            return reply
        crew.settled()
        if self._troubled:
            self._troubled = False
            log.info("the broker is back")
        return reply

    def _trouble(self, error: Exception) -> None:
        """Say once that the broker is away."""
        if not self._troubled:
            self._troubled = True
            log.error("%s; trying again", error)

    def _settle_alone(self, broker: Broker, verdict: Verdict) -> Reply:
        """One bad verdict must not hold up the others, nor take the worker down."""
        try:
            return broker.exchange(Step(self.owner.id, [verdict]))
        except BrokerUnavailable:
            self.crew.verdicts.append(verdict)
        except Exception as error:
            reason = storable(f"what became of it could not be stored: {error}")[:2000]
            log.exception("a verdict cannot be stored; its job fails")
            try:
                failed = Verdict(verdict.token, Outcome.FAIL, error=reason)
                return broker.exchange(Step(self.owner.id, [failed]))
            except TidemillError:
                self.crew.verdicts.append(verdict)  # the store has no room even for that, yet
        return Reply()

    def _end_burst(self, broker: Broker, reply: Reply) -> None:
        """Stop when all is done. Of what is on its way nobody tells when it comes elsewhere."""
        on_its_way = reply.more or (self._dry(reply) and self._carried(broker))
        if reply.leases or not on_its_way:
            self._again = ON_ITS_WAY
        if on_its_way:
            reply.next_due = min(reply.next_due, self._again)
            self._again = min(ON_ITS_WAY_MOST, 2 * self._again)
        elif self._dry(reply):
            self._stop_softly()

    def _carried(self, broker: Broker) -> bool:
        """Whether a carrier has jobs for this worker that have not arrived."""
        queues = self.settings.queues
        try:
            rows = broker.stats()
        except BrokerUnavailable as error:
            self._trouble(error)
            return True
        return any(row.carried for row in rows if not queues or row.name in queues)

    def _dry(self, reply: Reply) -> bool:
        """Nothing came and nothing is in hand: the end of a burst."""
        crew = self.crew
        started = bool(crew.hands) and all(hand.depth for hand in crew.hands)
        busy = any(hand.held for hand in crew.hands) or crew.verdicts or crew.spare
        at_once = not reply.next_due  # the store goes on
        more = reply.leases or reply.schedules or reply.more or at_once
        return started and self._asked > 0 and not (busy or more)

    def _next_look(self) -> float:
        seconds = self.crew.next_look()
        return min(seconds, self._stopping - machine_time()) if self._stopping else seconds

    def _collect(self, broker: Broker, timeout: float) -> None:
        """Sleep until something happens, and hear what it is."""
        fds = [hand.fileno() for hand in self.crew.hands if not hand.closed_at]
        try:
            ready = broker.wait(self.owner.id, max(0.0, timeout), [*fds, self._wake_read.fileno()])
        except (BrokerUnavailable, StoreFull) as error:
            self._trouble(error)
            self._select(fds, min(RETRY_AFTER, max(0.0, timeout)))
        else:
            self._take(ready)

    def _take(self, ready: list[int]) -> None:
        by_fd = {hand.fileno(): hand for hand in self.crew.hands}
        for fd in ready:
            hand = by_fd.get(fd)
            if hand is not None:
                self.crew.read(hand)
            else:
                self._take_signals()

    # -- orders and signals ---------------------------------------------------------------------

    def _obey(self, broker: Broker, command: Command) -> None:
        if command.verb in ("cancel", "terminate"):
            self.crew.obey(command)
        elif command.verb == "quiet":
            self._stopping = self._stopping or float("inf")
            self.crew.be_quiet()
        elif command.verb == "stop":
            self._stop_softly()
        elif command.verb == "dump":
            self.crew.dump()
        elif command.verb == "lost":
            self._begin_anew(broker)

    def _begin_anew(self, broker: Broker) -> None:
        """The broker took us for dead: others run what we held. Drop it and come back."""
        log.warning("the broker gave this worker up: what it held is lost, and it begins anew")
        self.crew.lose()
        with contextlib.suppress(BrokerUnavailable):  # the next exchange says so again
            broker.attach(self.owner)
        self._firing.forget()

    def stop(self) -> None:
        """Ask for a graceful stop, from any thread."""
        self.on_signal(signal.SIGTERM, None)

    def on_signal(self, signum: int, frame: object) -> None:
        """The handler of all our signals: note it and wake the loop."""
        self._signals.append(signum)
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        signals, self._signals = self._signals, []
        for signum in signals:
            gently = signum in (signal.SIGTERM, signal.SIGINT)
            if gently and machine_time() - self._told_at < SAME_SIGNAL:
                continue
            if gently and self._stopping in (0.0, float("inf")):
                self._told_at = machine_time()
                self._stop_softly()
            elif gently or signum == signal.SIGQUIT:
                log.warning("stopping now; what still runs goes back")
                self._stopping = machine_time()
                self.crew.end_all()
            elif signum == signal.SIGHUP and not self._stopping:
                self.crew.roll()
            elif signum == signal.SIGCHLD and self._mill is None:
                self.crew.reap()
            elif signum == signal.SIGUSR1:
                self.crew.dump()

    def _stop_softly(self) -> None:
        if self._stopping and self._stopping != float("inf"):
            return
        if not self.settings.burst:
            log.info("stopping: up to %g s for what runs", self.settings.shutdown_timeout)
        self._stopping = machine_time() + self.settings.shutdown_timeout
        self.crew.be_quiet()


def install(supervisor: Supervisor) -> Callable[[], None]:
    """Route this process's signals to the supervisor; returns what undoes it."""
    before = {signum: signal.signal(signum, supervisor.on_signal) for signum in _SIGNALS}

    def undo() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    return undo
