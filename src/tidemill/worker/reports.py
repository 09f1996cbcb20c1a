"""Reports of a worker, on request: the stacks, or a profile, of each of its processes.

A command brings the question: ``dump ID`` or ``profile ID SECONDS HERTZ``. The processes answer the
supervisor, which stores the answers as one note under the ID. The program that asked reads the note
from the store and deletes it. So worker and program may run on different machines. A note that
nobody has fetched within :data:`KEPT` seconds is deleted.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager

from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.notes import Notes
from tidemill.client.worker_reports import (
    KIND,
    Answer,
    Question,
    Report,
    encode_report,
)
from tidemill.core.clock import clock
from tidemill.errors import StoreGone, TidemillError
from tidemill.worker.parts import Part
from tidemill.worker.process import WorkerProcess

log = logging.getLogger("tidemill.worker")

KEPT = 600
"""Seconds after which a note that nobody has fetched is deleted."""

PRINTED = "printed"
"""The id of a question of the worker itself: the answers are printed on stderr, not stored."""

_PATIENCE = {"dump": 1.0, "profile": 3.0}
"""Seconds that a process has to answer, on top of the length of a profile."""


class _Open:
    """A question, the processes that have not answered, and the answers so far."""

    def __init__(self, verb: str, processes: Iterable[WorkerProcess], until: float) -> None:
        self.verb = verb
        self.waits = {process.pid: process for process in processes}
        self.until = until
        self.answers: list[Answer] = []

    @property
    def due(self) -> float:
        """Machine time at which the report is complete or overdue."""
        return self.until if self.waits else 0.0


class Reports(Part):
    """The open questions of one worker, under the lock of its pool."""

    def __init__(self, worker: str, lock: AbstractContextManager[object]) -> None:
        self._worker = worker
        self._lock = lock
        self._open: dict[str, _Open] = {}

    def ask(self, question: Question, processes: Iterable[WorkerProcess]) -> None:
        """Begin a question that these processes have received."""
        until = clock.machine() + question.seconds + _PATIENCE[question.verb]
        self._open[question.id] = _Open(question.verb, processes, until)

    def hear(self, pid: int, answers: Iterable[Answer]) -> None:
        """Add the answers of a process."""
        for answer in answers:
            question = self._open.get(answer.question)
            if question is not None and question.waits.pop(pid, None) is not None:
                question.answers.append(answer)

    @property
    def due(self) -> float:  # type: ignore[override]
        """Machine time at which a report is complete or overdue; infinity without a question."""
        if not self._open:
            return math.inf
        with self._lock:
            return min((q.due for i, q in self._open.items() if i != PRINTED), default=math.inf)

    @property
    def print_at(self) -> float:
        """Machine time at which all stacks that are to be printed are there, or overdue."""
        return self._open[PRINTED].due if PRINTED in self._open else math.inf

    def print_stacks(self) -> None:
        """Print the stacks. The watchdog does this, so that a stalled store does not delay it."""
        for answer in self._close(PRINTED).answers:
            sys.stderr.write(f"--- stacks of worker process {answer.pid}\n{answer.stacks}\n")
        sys.stderr.flush()

    def look(self, broker: Store) -> None:
        """Store the reports that are complete."""
        with self._lock:
            now = clock.machine()
            done = [i for i, q in self._open.items() if q.due <= now and i != PRINTED]
            reports = {question_id: self._close(question_id) for question_id in done}
        notes = Notes(broker, KIND, "a report")
        try:
            for question_id, report in reports.items():
                notes.put(question_id, encode_report(report), seconds=KEPT)
        except StoreGone:
            raise
        # The program that asked may ask again.
        except (TidemillError, OSError) as error:
            log.warning("a report of this worker is not kept: %s", error)

    def _close(self, question_id: str) -> Report:
        """Take the report of a question."""
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
