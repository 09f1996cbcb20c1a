"""The log lines of jobs that failed because their whole worker died.

The store fails such a job when a process gives up the dead worker. The processes of the worker are
dead, too, and cannot log. So the process that gives the worker up writes the lines.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

import msgspec

from tidemill.core.envelope import Envelope
from tidemill.core.job import Record, State

log = logging.getLogger("tidemill.lost")

LOST = "lost with its worker"  # the beginning of the error of such a job
MOST_LOOKED_AT = 1000  # the most jobs of a dead worker that are read to find the failed jobs
_MOST_LINES = 20


def lost_text(losses: int, most: int) -> str:
    return f"{LOST}: loss {losses} of {most}"


def lost_line(seconds: float, worker: str) -> str:
    """The line in the log of a job whose worker was lost ``seconds`` after it got the job."""
    return f"lost after {seconds:.3f} s with its worker {worker}"


class LostJob(msgspec.Struct, frozen=True):
    """A job that failed because its workers were lost, and its error."""

    envelope: Envelope
    error: str


class _Attributes(logging.Filter):
    """Gives a record the attributes that other lines about a job have."""

    def filter(self, record: logging.LogRecord) -> bool:
        job = getattr(record, "lost_job", None)
        if isinstance(job, Envelope):
            record.tidemill_job_id, record.tidemill_task = job.id, job.called
            record.tidemill_queue = job.queue
        return True


log.addFilter(_Attributes())


def log_lost(jobs: Sequence[LostJob]) -> None:
    """Write a line for each job; for more than 20 jobs, a line with the number of the others."""
    for job in itertools.islice(jobs, _MOST_LINES):
        envelope = job.envelope
        log.error(
            "%s[%s] failed (queue %s): %s; not again",
            *(envelope.called, envelope.id, envelope.queue, job.error),
            extra={"lost_job": envelope},
        )
    if len(jobs) > _MOST_LINES:
        log.error("%d more jobs failed: lost with their worker", len(jobs) - _MOST_LINES)


def log_failed(records: Iterable[Record | None]) -> None:
    """Write the lines of those jobs of a dead worker that failed because the worker was lost."""
    log_lost(
        [
            LostJob(record.envelope, record.error)
            for record in records
            if record is not None and record.state is State.FAILED and record.error.startswith(LOST)
        ]
    )
