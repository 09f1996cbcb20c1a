"""One run of one job in a worker process: its deadline, and how it was interrupted."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.client.context import JobContext
from tidemill.core.retry import JobTerminated, JobTimeout, WorkerStopping
from tidemill.worker.waiting_job import WaitingJob

Interrupt = type[JobTimeout] | type[JobTerminated] | type[WorkerStopping]
"""The exceptions that end a run from outside."""


class Run:
    """One run of one job. ``ident`` names the thread; ``started`` is wall time."""

    __slots__ = (
        "asked",
        "asyncio_task",
        "caught",
        "context",
        "deadline",
        "envelope",
        "fault",
        "ident",
        "interrupted",
        "lease",
        "loop",
        "nudged",
        "row",
        "sent",
        "started",
        "task",
        "token",
        "wanted",
    )

    def __init__(self, job: WaitingJob, context: JobContext, ident: int, started: float) -> None:
        self.lease = job.lease
        self.token = job.token
        self.envelope = job.envelope
        self.task = job.task
        self.context = context
        self.ident = ident
        self.started = started
        self.row = 0  # the run's row on the scoreboard
        self.deadline = 0.0  # machine time, 0 for none
        # The interruption that a terminate, timeout or stop asked for.
        self.wanted: Interrupt | None = None
        # The interruption that came before the end of the job.
        self.interrupted: Interrupt | None = None
        self.caught = False  # True when the task caught the interruption and returned
        self.asked = 0.0  # machine time of the first try to interrupt
        self.nudged = 0.0  # machine time of the latest try to interrupt
        # The error of the job when its subtask raised SystemExit.
        self.fault: BaseException | None = None
        self.sent: Any = None  # a lock, released once the exception is sent
        self.asyncio_task: asyncio.Task[Any] | None = None  # the asyncio task of an async job
        self.loop: asyncio.AbstractEventLoop | None = None
