"""Reports of a worker, on request: the stacks, or a profile, of each of its processes.

A command brings the question: ``dump ID`` or ``profile ID SECONDS HERTZ``. The processes answer the
supervisor, which stores the answers as one note under the ID. The program that asked reads the note
from the store and deletes it. So worker and program may run on different machines. A note that
nobody has fetched within :data:`KEPT` seconds is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable

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
from tidemill.worker.worker_process import WorkerProcess

KEPT = 600
"""Seconds after which a note that nobody has fetched is deleted."""

_PATIENCE = {"dump": 1.0, "profile": 3.0}
"""Seconds that a process has to answer, on top of the length of a profile."""


class _Open:
    """A question, the processes that have not answered, and the answers so far."""

    def __init__(self, verb: str, processes: Iterable[WorkerProcess], until: float) -> None:
        self.verb = verb
        self.waits = {process.pid: process for process in processes}
        self.until = until
        self.answers: list[Answer] = []


class Reports:
    """The open questions of one worker, and the reports that are not stored yet."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
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
    def due_in(self) -> float:
        """Seconds until :meth:`complete` has something to do; infinity without a question."""
        now = clock.machine()
        times = [q.until - now if q.waits else 0.0 for q in self._open.values()]
        return max(0.0, min(times, default=float("inf")))

    def complete(self) -> dict[str, Report]:
        """Take the reports that are complete or overdue, by the id of the question."""
        now, done = clock.machine(), dict[str, Report]()
        for question_id, question in list(self._open.items()):
            if question.waits and now < question.until:
                continue
            del self._open[question_id]
            if question.verb == "dump":
                question.answers += _from_outside(question_id, question.waits.values())
            answered = {answer.pid for answer in question.answers}
            silent = [pid for pid in question.waits if pid not in answered]
            done[question_id] = Report(self._worker, question.verb, question.answers, silent)
        return done


def keep_reports(broker: Store, reports: dict[str, Report]) -> None:
    """Store these reports."""
    notes = Notes(broker, KIND, "a report")
    for question_id, report in reports.items():
        notes.put(question_id, encode_report(report), seconds=KEPT)


def _from_outside(question: str, processes: Iterable[WorkerProcess]) -> list[Answer]:
    """The stacks of processes that a task keeps from answering."""
    read = [(process.pid, process.stacks()) for process in processes]
    return [Answer(question, pid, stacks) for pid, stacks in read if stacks]
