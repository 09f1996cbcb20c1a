"""Types that programs only name in annotations; nothing here is made by its users."""

from __future__ import annotations

from tidemill.brokers.contract.inspection import Page, QueueStats
from tidemill.client.events import NewJob
from tidemill.client.job_handle import Completed
from tidemill.client.options import CallOptions, PublishOptions, PutOptions, TaskOptions
from tidemill.client.search import Found
from tidemill.client.task import AsyncTask, PartialCall
from tidemill.core.job import Attempt, Record

__all__ = [
    "AsyncTask",
    "Attempt",
    "CallOptions",
    "Completed",
    "Found",
    "NewJob",
    "Page",
    "PartialCall",
    "PublishOptions",
    "PutOptions",
    "QueueStats",
    "Record",
    "TaskOptions",
]
