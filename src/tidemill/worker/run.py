"""One run of one job in a worker process: its deadline, and how it was interrupted."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.client.context import JobContext
from tidemill.core.retry import JobTerminated, JobTimeout, WorkerStopping
from tidemill.worker.waiting_job import WaitingJob

__all__ = ["Interrupt", "Run"]

Interrupt = type[JobTimeout] | type[JobTerminated] | type[WorkerStopping]
"""The exceptions that end a run from outside."""


class Run:
    """One run of one job. ``ident`` is the thread; ``started`` is wall time."""

    __slots__ = (
        "asked",
        "asyncio_task",
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
        self.row = 0  # on the scoreboard
        self.deadline = 0.0  # machine time, 0 for none
        self.wanted: Interrupt | None = None  # asked for by a terminate, a timeout or a stop
        self.interrupted: Interrupt | None = None  # sent; from then on the run cannot win
        self.asked = 0.0  # machine time of the first try to interrupt
        self.nudged = 0.0  # machine time of the latest try
        self.fault: BaseException | None = None  # raised by a subtask to end the event loop
        self.sent: Any = None  # a lock that is free once the exception is on its way
        self.asyncio_task: asyncio.Task[Any] | None = None  # of an async job
        self.loop: asyncio.AbstractEventLoop | None = None
