"""The parts of a worker: what it does besides its jobs, each in a class that one can leave out.

A supervisor has a list of parts. Schedules, declarations of tasks and the numbers of the history
have files of their own. The small parts are here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.notes import Notes
from tidemill.client.history import Deploy, QueueSnapshots
from tidemill.client.search import users_queues
from tidemill.client.worker_reports import KIND, Answer, Question, Report, encode_report
from tidemill.core.clock import clock
from tidemill.core.job import State as JobState
from tidemill.core.verdicts import waits_for_its_task
from tidemill.core.words import counted
from tidemill.errors import StoreGone, TidemillError
from tidemill.worker.child_protocol import Hello
from tidemill.worker.process import State, WorkerProcess

if TYPE_CHECKING:
    from tidemill.worker.pool import ProcessPool

log = logging.getLogger("tidemill.worker")

RELEASES_KEPT = 90 * 86_400.0  # seconds for which the note of a release is kept, as hourly history
ON_ITS_WAY, ON_ITS_WAY_MOST = 0.1, 1.0
"""Seconds between two checks for jobs on their way to the worker: at first, and at most."""

REPORT_KEPT = 600  # seconds after which a report that nobody has fetched is deleted
PRINTED = "printed"
"""The id of a question of the worker itself: the answers are printed on stderr, not stored."""

_LOOK, _NAMED = 500, 5  # at the end of a burst: the most jobs to look at, and the most names to log
_PATIENCE = {"dump": 1.0, "profile": 3.0}  # seconds to answer, on top of the length of a profile


class Part:
    """One part of a worker. The thread that calls the store calls all methods.

    ``look`` and ``after_reply`` may raise BrokerUnavailable: then they are called again later.
    """

    due = math.inf
    """Machine time of the next ``look``. The worker sleeps no longer than that."""

    rests = False
    """True for a part that does nothing once the worker stops."""

    def look(self, broker: Store) -> None:
        """Do what is due."""

    def greet(self, hello: Hello) -> None:
        """A process has loaded the app."""

    def before_step(self, step: Step) -> None:
        """Add to a step. The lock of the pool is held."""

    def after_reply(self, broker: Store, reply: Reply) -> None:
        """Act on the reply to a step that the store has taken."""

    def forget(self) -> None:
        """The store has given the worker up, and may have forgotten what it knew."""

    def end(self, broker: Store) -> None:
        """The worker has detached."""


class Snapshots(Part):
    """Keeps the totals of the queues once a minute, if this worker had work meanwhile."""

    def __init__(self) -> None:
        self.queues = QueueSnapshots()

    @property
    def due(self) -> float:  # type: ignore[override]
        seconds = self.queues.due_in()
        return clock.machine() + seconds if seconds else 0.0

    def look(self, broker: Store) -> None:
        self.queues.keep(broker)

    def after_reply(self, broker: Store, reply: Reply) -> None:
        if reply.settled or reply.leases or reply.schedules:
            self.queues.acted()

    def end(self, broker: Store) -> None:
        self.queues.keep(broker, ending=True)


class DeployNote(Part):
    """The first worker with a new release keeps a note of the release."""

    due = 0.0

    def __init__(self, release: str) -> None:
        self._release = release

    def look(self, broker: Store) -> None:
        self.due, release = math.inf, self._release
        if not release or Feature.HISTORY not in broker.features:
            return
        notes = Notes(broker, "deploy", "a release")
        try:
            if notes.get(release):
                return
            note = Deploy(release, int(clock.wall()))
            notes.put(release, msgspec.msgpack.encode(note), seconds=RELEASES_KEPT)
        except (TidemillError, OSError) as error:
            log.warning("the release %s is not noted: %s", release, error)
        else:
            log.info("the release %s is new to this store", release)


class Burst(Part):
    """Stops the worker when no job is ready, running, or on its way to the worker."""

    rests = True

    def __init__(self, pool: ProcessPool, stop: Callable[[], None]) -> None:
        self._pool = pool
        self._stop = stop
        self._asked = False  # True when the latest step asked for leases
        self._again = ON_ITS_WAY

    def before_step(self, step: Step) -> None:
        self._asked = step.want is not None and step.want.count > 0

    def after_reply(self, broker: Store, reply: Reply) -> None:
        """Stop if no work is left.

        Jobs on their way send no wake-up. While such jobs exist, ``reply.next_due`` is shortened,
        so that the worker checks again soon.
        """
        if reply.leases or not reply.more:
            self._again = ON_ITS_WAY
        if reply.more:
            reply.next_due = min(reply.next_due, self._again)
            self._again = min(ON_ITS_WAY_MOST, 2 * self._again)
        with self._pool.lock:
            if not self._is_dry(reply):
                return
            self._stop()
        with contextlib.suppress(TidemillError):
            if left := _left(broker, self._pool.settings.queues):
                log.info("no job is left to run now; the store keeps %s", left)

    def _is_dry(self, reply: Reply) -> bool:
        """True when no lease came, and no process has anything to do."""
        pool = self._pool
        started = bool(pool.processes) and all(process.depth for process in pool.processes)
        busy = any(p.held or p.stuck or p.state >= State.KILLED for p in pool.processes)
        busy = busy or bool(pool.verdicts or pool.dispatch.spare)
        at_once = not reply.next_due  # with ``next_due`` 0 the store has more work now
        more = reply.leases or reply.schedules or reply.more or at_once
        return started and self._asked and not (busy or more)


def _left(broker: Store, queues: Collection[str]) -> str:
    """The unfinished jobs of the queues, and why they do not run now; empty without such jobs."""
    rows = [row for row in users_queues(broker.stats()) if not queues or row.name in queues]
    parts = []
    if scheduled := sum(row.scheduled for row in rows):
        parts.append(counted(scheduled, "scheduled job") + _of_unknown_tasks(broker, queues))
    if waiting := sum(row.waiting for row in rows):
        parts.append(f"{counted(waiting, 'job')} that must wait for other jobs")
    if held := [row for row in rows if row.paused and row.ready]:
        names = ", ".join(row.name for row in held[:_NAMED])
        jobs = counted(sum(row.ready for row in held), "ready job")
        parts.append(f"{jobs} in paused queues ({names})")
    if ready := sum(row.ready for row in rows if not row.paused):
        parts.append(f"{counted(ready, 'other ready job')} (tidemill explain ID says why)")
    return ", ".join(parts)


def _of_unknown_tasks(broker: Store, queues: Collection[str]) -> str:
    """How many of the scheduled jobs wait for a worker that knows their task; empty for none."""
    if Feature.INSPECT not in broker.features:
        return ""
    look = Filter(states=frozenset({JobState.SCHEDULED}), look=_LOOK)
    found = [
        record.envelope
        for record in broker.find(look, _LOOK).records
        if waits_for_its_task(record) and (not queues or record.envelope.queue in queues)
    ]
    names = ", ".join(sorted({job.task for job in found})[:_NAMED])
    return f" ({len(found)} of tasks that this app does not know: {names})" if found else ""


class _OpenQuestion:
    """A question, the processes that have not answered, and the answers so far."""

    def __init__(self, verb: str, processes: Iterable[WorkerProcess], until: float) -> None:
        self.verb = verb
        self.waits = {process.pid: process for process in processes}
        self.until = until
        self.answers: list[Answer] = []

    @property
    def due(self) -> float:
        return self.until if self.waits else 0.0


class Reports(Part):
    """Reports on request: the stacks, or a profile, of each process. The pool's lock guards them.

    A command brings the question: ``dump ID`` or ``profile ID SECONDS HERTZ``. The processes answer
    the supervisor, which stores the answers as one note under the ID. The program that asked reads
    the note from the store and deletes it. So worker and program may run on different machines. A
    note that nobody has fetched within :data:`REPORT_KEPT` seconds is deleted.
    """

    def __init__(self, worker: str, lock: AbstractContextManager[object]) -> None:
        self._worker = worker
        self._lock = lock
        self._open: dict[str, _OpenQuestion] = {}

    def ask(self, question: Question, processes: Iterable[WorkerProcess]) -> None:
        until = clock.machine() + question.seconds + _PATIENCE[question.verb]
        self._open[question.id] = _OpenQuestion(question.verb, processes, until)

    def hear(self, pid: int, answers: Iterable[Answer]) -> None:
        for answer in answers:
            question = self._open.get(answer.question)
            if question is not None and question.waits.pop(pid, None) is not None:
                question.answers.append(answer)

    @property
    def due(self) -> float:  # type: ignore[override]
        if not self._open:
            return math.inf
        with self._lock:
            return min((q.due for i, q in self._open.items() if i != PRINTED), default=math.inf)

    @property
    def print_at(self) -> float:
        """Machine time at which all stacks that are to be printed are there, or overdue."""
        return self._open[PRINTED].due if PRINTED in self._open else math.inf

    def print_stacks(self) -> None:
        """Print the stacks. The main thread does this, so a stalled store does not delay it."""
        answers = self._close(PRINTED).answers
        try:
            for answer in answers:
                sys.stderr.write(f"--- stacks of worker process {answer.pid}\n{answer.stacks}\n")
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError) as error:  # stderr is None, broken or closed
            log.warning("the stacks of this worker cannot be printed on stderr: %s", error)

    def look(self, broker: Store) -> None:
        with self._lock:
            now = clock.machine()
            done = [i for i, q in self._open.items() if q.due <= now and i != PRINTED]
            reports = {question_id: self._close(question_id) for question_id in done}
        notes = Notes(broker, KIND, "a report")
        try:
            for question_id, report in reports.items():
                notes.put(question_id, encode_report(report), seconds=REPORT_KEPT)
        except StoreGone:
            raise
        # The program that asked may ask again.
        except (TidemillError, OSError) as error:
            log.warning("a report of this worker is not kept: %s", error)

    def _close(self, question_id: str) -> Report:
        question = self._open.pop(question_id)
        if question.verb == "dump":
            question.answers += _from_outside(question_id, question.waits.values())
        answered = {answer.pid for answer in question.answers}
        silent = [pid for pid in question.waits if pid not in answered]
        return Report(self._worker, question.verb, question.answers, silent)


def _from_outside(question: str, processes: Iterable[WorkerProcess]) -> list[Answer]:
    """The stacks of processes that a task keeps from answering."""
    read = [(process.pid, process.stacks()) for process in processes]
    return [Answer(question, pid, stacks) for pid, stacks in read if stacks]
