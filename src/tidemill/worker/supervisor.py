"""The supervisor: the only part of a worker that talks to the broker. It imports no user code.

It is the broker's *owner*: it leases jobs for all its processes (:mod:`.crew`), hands them out,
collects their verdicts, and knows, when one dies, what it was running. That the conversation is
here and not in the processes has a reason: a store step made from a process whose threads compute,
or hold the interpreter lock in a C call, would keep every other process out of the store as long.

    exchange ──► hand out ──► wait (broker, processes, signals) ──► collect ──► …

A call of the store may take as long as the store likes. Timeouts, kills and signals do not wait for
it: a second thread looks after them (:mod:`.watch`) and never calls the store. Both use the
processes under one lock, which is not held during a call of the store.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable

from tidemill.app import Tidemill
from tidemill.brokers.base import Broker, Feature, Reply, Step, Want, need, open_broker
from tidemill.clock import machine_time, new_id, wall_time
from tidemill.crash import point
from tidemill.errors import (
    BrokerUnavailable,
    FeatureMissing,
    InvalidOption,
    StoreFull,
    StoreGone,
    StoreMoved,
)
from tidemill.job import Command, Note, Owner, Verdict
from tidemill.worker.crew import Crew
from tidemill.worker.firing import Firing
from tidemill.worker.folder import Folder
from tidemill.worker.leaving import Leaving, store_last
from tidemill.worker.ledger import Ledger
from tidemill.worker.refusals import Refusals
from tidemill.worker.settings import Settings
from tidemill.worker.signals import Signals
from tidemill.worker.watch import Watch

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

_UNTAKEN = (BrokerUnavailable, StoreFull, OSError)
"""A store that is away or full: the call may be made again."""


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
        self._ledger = Ledger()
        self._refusals = Refusals(self.owner.id, self._settled, self._keep)
        self._stopping = 0.0  # machine time at which a graceful stop ends; 0 while serving
        self._leaving = Leaving(INTERRUPTED)
        self._asked = 0
        self._again = ON_ITS_WAY
        self._troubled = False  # the broker is away, and it has been said
        self._lock = threading.RLock()
        self._told_at = 0.0  # machine time of the first TERM or INT
        self.signals = Signals()
        self._watch = Watch(self._look, self.signals.fileno())

    # -- life -----------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to stop; returns the exit code.

        0 clean, 1 jobs were interrupted, 2 the app could not be loaded, 3 the broker could not be
        reached, or has no room.
        """
        try:
            return self._run()
        except (BrokerUnavailable, StoreFull) as error:
            log.error("%s", error)
            return UNREACHABLE
        except (FeatureMissing, InvalidOption, StoreMoved) as error:
            log.error("%s", error)
            return UNUSABLE
        finally:
            self._watch.close()
            self.crew.close()
            if self._mill is None and self.broker is not None:
                self.broker.close()
            self._folder.remove()
            self.signals.close()

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
        self._watch.start()
        broker.attach(self.owner)
        if Feature.UNKNOWN in broker.features:
            self.crew.known.begin()
        log.info(
            "worker %s serves %s of %s with %d x %d",
            self.owner.name,
            ", ".join(self.settings.queues) or "all queues",
            broker.url,
            self.settings.processes,
            self.settings.concurrency,
        )
        try:
            while not (self._stopping and self.crew.over):
                self._turn(broker)
        finally:
            with self._lock:
                self.crew.end_all()
            pause = functools.partial(self._poll, [], RETRY_AFTER)
            if store_last(self.crew, functools.partial(self._exchange, broker), pause):
                with contextlib.suppress(*_UNTAKEN):  # the store notices our end
                    broker.detach(self.owner.id)
        how = ", jobs were interrupted" if self.crew.interrupted else ""
        log.info("worker %s is done%s", self.owner.name, how)
        return INTERRUPTED if self.crew.interrupted else CLEAN

    def _await_first(self) -> int | None:
        """The first process tells where the broker is, who alone has the app; or an exit code."""
        hand = self.crew.hands[0]
        while True:
            self._poll([hand.fileno()], 3600.0)
            if self._stopping:
                return CLEAN
            if hand.hello is not None and hand.hello.error:
                return UNUSABLE
            if hand not in self.crew.hands or hand.closed_at:
                log.error("the app %s could not be loaded", self.settings.app)
                return UNUSABLE
            if hand.hello is not None:
                return None

    def _poll(self, fds: list[int], timeout: float) -> None:
        poll = select.poll()
        for fd in (*fds, *self.signals.fds()):
            poll.register(fd, select.POLLIN)
        self._take([fd for fd, _ in poll.poll(timeout * 1000)])

    # -- one turn -------------------------------------------------------------------------------

    def _turn(self, broker: Broker) -> None:
        self._declare(broker)
        reply = self._exchange(broker)
        point("worker.exchanged")
        self._fire(broker, reply)
        self._ledger.lend(reply.leases)
        with self._lock:
            self.crew.deal(reply.leases)
            point("worker.handed")
        for command in reply.commands:
            self._obey(broker, command)
        with self._lock:
            self._watch.expect(self.crew.next_look())
        if self.settings.burst:
            self._end_burst(broker, reply)
        self._collect(broker, reply.next_due)
        point("worker.collected")

    def _look(self) -> float:
        """In the watch: see to all that cannot wait for the store; when to look again."""
        with self._lock:
            crew = self.crew
            crew.news = False
            self._take_signals()
            crew.look_after()
            if self._stopping and machine_time() >= self._stopping:
                crew.end_all()
            if crew.news:
                self.signals.ring()
            at = crew.next_look(exact=True)
            if self._stopping and crew.over:
                return self._leaving.look(crew) if self._mill is None else at
            return min(at, self._stopping) if self._stopping else at

    def _declare(self, broker: Broker) -> None:
        """Store the schedules of the app, as the latest of its processes has loaded it."""
        hellos = [hand.hello for hand in self.crew.hands if hand.hello is not None]
        if hellos and not hellos[-1].error and not self._stopping:
            try:
                self._firing.declare(broker, hellos[-1])
            except (BrokerUnavailable, OSError) as error:
                self._trouble(error)

    def _fire(self, broker: Broker, reply: Reply) -> None:
        """See to the schedules that are due, and look at once for what they put."""
        if reply.schedules:
            reply.next_due = 0.0
            try:
                self._firing.fire(broker, reply.schedules, reply.wall)
            except (BrokerUnavailable, OSError) as error:
                self._trouble(error)
                reply.next_due = RETRY_AFTER

    def _exchange(self, broker: Broker) -> Reply:
        crew = self.crew
        fires = 0 if self._stopping else self._firing.count(broker)
        with self._lock:
            self._asked = 0 if self._stopping else crew.room()
            known = crew.known
            known.load([hand.hello for hand in crew.hands if hand.serving and hand.hello])
            want = Want(
                self._asked,
                self.settings.queues,
                self.settings.mode,
                alone=crew.can_isolate,
                knows=known.names,
                told=known.told,
            )
            crew.verdicts += crew.place_spare()
            verdicts, crew.verdicts = crew.verdicts, []
            crew.sent = verdicts
            notes, crew.notes = crew.notes, []
            shares = crew.shares.unsettled()
        held = self._ledger.held()
        step = Step(self.owner.id, verdicts, want, notes=notes, fires=fires, held=held)
        try:
            reply = broker.exchange(step)
        except (BrokerUnavailable, OSError) as error:
            self._trouble(error)
            with self._lock:
                crew.verdicts, crew.notes = verdicts + crew.verdicts, notes + crew.notes
            self._asked = 0  # nothing was asked for: an empty reply says nothing
            return Reply(next_due=RETRY_AFTER)
        except Exception as error:
            if not (verdicts or notes or isinstance(error, StoreFull)):
                raise
            self._asked = 0
            reply = self._refusals.settle(broker, verdicts, notes, error)
            reply.next_due = min(reply.next_due, RETRY_AFTER)
            return reply
        again = self._ledger.answered(step, reply)
        with self._lock:
            crew.settled(verdicts, shares)
            crew.verdicts += again
        if known.hear(reply) or reply.behind or again:
            reply.next_due = 0.0
        self._refusals.say_room()
        if self._troubled:
            self._troubled = False
            log.info("the broker is back")
        return reply

    def _trouble(self, error: Exception) -> None:
        """Say once that the broker is away.

        Raises:
            StoreGone: it will not come back: this worker leaves.
        """
        if isinstance(error, StoreGone):
            raise error
        if isinstance(error, StoreFull):
            self._refusals.say_full(error)
        elif not self._troubled:
            self._troubled = True
            log.error("%s; trying again", error)

    def _keep(self, verdicts: list[Verdict], notes: list[Note]) -> None:
        with self._lock:
            self.crew.verdicts += verdicts
            self.crew.notes = notes + self.crew.notes

    def _settled(self, verdicts: list[Verdict]) -> None:
        self._ledger.settled(verdicts)
        with self._lock:
            self.crew.settled(verdicts, [])

    def _end_burst(self, broker: Broker, reply: Reply) -> None:
        """Stop when all is done. Of what is on its way nobody tells when it comes elsewhere."""
        with self._lock:
            dry = self._dry(reply)
        on_its_way = reply.more or (dry and self._carried(broker))
        if reply.leases or not on_its_way:
            self._again = ON_ITS_WAY
        if on_its_way:
            reply.next_due = min(reply.next_due, self._again)
            self._again = min(ON_ITS_WAY_MOST, 2 * self._again)
        elif dry:
            with self._lock:
                self._stop_softly()

    def _carried(self, broker: Broker) -> bool:
        """Whether a carrier has jobs for this worker that have not arrived."""
        queues = self.settings.queues
        try:
            rows = broker.stats()
        except (BrokerUnavailable, OSError) as error:
            self._trouble(error)
            return True
        return any(row.carried for row in rows if not queues or row.name in queues)

    def _dry(self, reply: Reply) -> bool:
        """Nothing came and nothing is in hand: the end of a burst."""
        crew = self.crew
        started = bool(crew.hands) and all(hand.depth for hand in crew.hands)
        busy = any(hand.held or hand.stuck or hand.killed for hand in crew.hands)
        busy = busy or bool(crew.verdicts or crew.spare)
        at_once = not reply.next_due  # the store goes on
        more = reply.leases or reply.schedules or reply.more or at_once
        return started and self._asked > 0 and not (busy or more)

    def _collect(self, broker: Broker, timeout: float) -> None:
        """Sleep until something happens, and hear what it is."""
        with self._lock:
            fds = [hand.fileno() for hand in self.crew.hands if not hand.closed_at]
        try:
            ready = broker.wait(self.owner.id, max(0.0, timeout), [*fds, *self.signals.fds()])
        except _UNTAKEN as error:
            self._trouble(error)
            self._poll(fds, min(RETRY_AFTER, max(0.0, timeout)))
        else:
            self._take(ready)

    def _take(self, ready: list[int]) -> None:
        with self._lock:
            by_fd = {hand.fileno(): hand for hand in self.crew.hands}
            for fd in ready:
                if (hand := by_fd.get(fd)) is not None:
                    self.crew.read(hand)
                else:
                    self.signals.heard()
                    self._take_signals()
            self._watch.expect(self.crew.next_look())

    # -- orders and signals ---------------------------------------------------------------------

    def _obey(self, broker: Broker, command: Command) -> None:
        if command.verb == "lost":
            self._begin_anew(broker)
            return
        with self._lock:
            if command.verb in ("cancel", "terminate"):
                self.crew.obey(command)
            elif command.verb == "quiet":
                self._stopping = self._stopping or float("inf")
                self.crew.be_quiet()
            elif command.verb == "stop":
                self._stop_softly()
            elif command.verb == "dump":
                self.crew.dump()

    def _begin_anew(self, broker: Broker) -> None:
        """The broker took us for dead: others run what we held. Drop it and come back."""
        log.warning("the broker gave this worker up: what it held is lost, and it begins anew")
        with self._lock:
            self.crew.lose()
        with contextlib.suppress(*_UNTAKEN):  # the next exchange says so again
            broker.attach(self.owner)
        self._firing.forget()
        self._ledger.forget()
        self.crew.known.forget()

    def stop(self) -> None:
        """Ask for a graceful stop, from any thread."""
        self.signals.send(signal.SIGTERM)

    def _take_signals(self) -> None:
        """With the lock: do what signals ask for. The first thread that comes takes them."""
        signals = self.signals.take()
        for signum in signals:
            self._take_signal(signum)
        if signals:
            self._watch.expect(machine_time())
            self.signals.ring()

    def _take_signal(self, signum: int) -> None:
        gently = signum in (signal.SIGTERM, signal.SIGINT)
        if gently and machine_time() - self._told_at < SAME_SIGNAL:
            return
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
        for hand in self.crew.hands:
            hand.stop_in(self.settings.shutdown_timeout)


def install(supervisor: Supervisor) -> Callable[[], None]:
    """Route this process's signals to the supervisor; returns what undoes it."""
    return supervisor.signals.install()
