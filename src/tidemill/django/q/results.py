"""Tasks that have ended, and groups, as django-q shows them: ``wait`` is in milliseconds."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from hashlib import blake2b
from typing import Any

from tidemill.client.job_handle import Job
from tidemill.client.task import Ended
from tidemill.core.config import MAX_NAME
from tidemill.core.job import GROUP, Record, State
from tidemill.django.framework.results import arguments_of, moment_of
from tidemill.django.model_arguments import of_key
from tidemill.django.project import DjangoMill, project_mill
from tidemill.errors import JobNotFound, ResultTimeout

UNGROUP = "tidemill.django.q.ungroup"  # its arguments are the tasks that have left their group
POLL = 0.05  # seconds between two reads of a group whose tasks are not all enqueued yet


def group_tag(name: str) -> str:
    return f"group:{name}"


def ungrouped_tag(name: str) -> str:
    """The tag of the jobs that record which tasks have left a group."""
    return f"left:{name}"


def name_tag(name: str) -> str:
    """The tag of a task's name, which is any text. A hash ends the tag of a name that is cut."""
    text = "".join(char if char.isprintable() else " " for char in f"name:{name}")
    if len(text.encode()) <= MAX_NAME:
        return text
    ending = f"…{blake2b(text.encode(), digest_size=8).hexdigest()}"
    return text.encode()[: MAX_NAME - len(ending.encode())].decode(errors="ignore") + ending


@dataclasses.dataclass
class Task:
    """A task that has ended; the attributes are those of django-q.

    Attributes:
        result: the value of the function, or the error as text.
        success: True when the function returned.
    """

    id: str
    name: str = ""
    func: str = ""
    hook: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    result: Any = None
    group: str | None = None
    cluster: str | None = None
    started: dt.datetime | None = None
    stopped: dt.datetime | None = None
    success: bool = False
    attempt_count: int = 0

    @classmethod
    def of(cls, mill: DjangoMill, task_id: str) -> Task | None:
        """The task of a job that has ended; None for an unfinished or missing job."""
        if (inline := mill.runtime.inline_jobs.get(task_id)) is not None:  # it ran with sync=True
            return cls.of_record(mill, inline)
        record = mill.runtime.job_store.get(task_id)
        if record is None or not record.state.finished:
            return None
        task = cls.of_record(mill, record)
        if task.group and task.id in _ungrouped(mill, task.group):
            task.group = None
        return task

    @classmethod
    def of_record(cls, mill: DjangoMill, record: Record) -> Task:
        envelope = record.envelope
        task = cls(id=envelope.id, name=envelope.id, cluster=envelope.queue)
        if envelope.task != GROUP:
            args, _ = arguments_of(envelope)
            task.func, task.args = args[0], tuple(map(of_key, args[1]))
            task.kwargs = {name: of_key(value) for name, value in args[2].items()}
        for tag in envelope.tags:
            kind, _, value = tag.partition(":")
            if kind == "group":
                task.group = value
            elif kind == "name":
                task.name = value
        ended = record.attempts[-1] if record.attempts else None
        task.attempt_count = len(record.attempts)
        task.started = moment_of(ended.started if ended else envelope.created)
        task.stopped = moment_of(record.finished)
        task.success = record.state is State.SUCCEEDED
        if task.success:
            job: Job[Any] = mill.job(envelope.id)
            job.remember(record)
            task.result = job.result(timeout=0)
        else:
            trace = ended.traceback if ended else ""
            task.result = f"{record.error} : {trace}" if trace else record.error
        return task

    @classmethod
    def of_end(cls, ended: Ended) -> Task:
        """The task of a job that is no longer kept."""
        value = ended.result if ended.succeeded else ended.error
        return cls(id=ended.id, name=ended.id, result=value, success=ended.succeeded)

    def time_taken(self) -> float:
        """Seconds from the start to the end."""
        if self.started is None or self.stopped is None:
            return 0.0
        return (self.stopped - self.started).total_seconds()

    def group_result(self, failures: bool = False) -> list[Any] | None:
        """The results of the task's group."""
        return result_group(self.group, failures) if self.group else None

    def group_count(self, failures: bool = False) -> int:
        """The number of tasks in the task's group."""
        return count_group(self.group, failures) if self.group else 0


def result(task_id: str, wait: int = 0, cached: bool = False) -> Any:
    """The result of a task; the error as text for a failed task; None before its end.

    ``wait`` is in milliseconds; a negative number waits without end. ``cached`` has no effect.
    """
    task = fetch(task_id, wait)
    return task.result if task is not None else None


def fetch(task_id: str, wait: int = 0, cached: bool = False) -> Task | None:
    """A task that has ended, by its id or its name; None before its end."""
    mill = project_mill()
    if mill.runtime.inline_jobs.get(task_id) is not None:
        return Task.of(mill, task_id)
    found = _job(task_id)
    if found is None:
        return None
    try:
        found.wait(None if wait < 0 else wait / 1000)
    except (ResultTimeout, JobNotFound):
        return None
    return Task.of(mill, found.id)


def _job(task_id: str) -> Job[Any] | None:
    mill = project_mill()
    if mill.runtime.job_store.get(task_id) is not None:
        return mill.job(task_id)
    return next(iter(mill.jobs(tag=name_tag(task_id))), None)


def result_group(
    group_id: str,
    failures: bool = False,
    wait: int = 0,
    count: int | None = None,
    cached: bool = False,
) -> list[Any]:
    """The results of a group, in the order in which the tasks were enqueued.

    With ``count`` the call waits for this number of results. Without ``count`` it waits for the
    results of all tasks.
    """
    return [task.result for task in fetch_group(group_id, failures, wait, count)]


def fetch_group(
    group_id: str,
    failures: bool = True,
    wait: int = 0,
    count: int | None = None,
    cached: bool = False,
) -> list[Task]:
    """The tasks of a group that have ended."""
    until = time.monotonic() + (1e9 if wait < 0 else wait / 1000)
    while True:
        ended, unfinished = split_group(group_id)
        tasks = [task for task in ended if failures or task.success]
        enough = len(tasks) >= count if count else bool(ended) and not unfinished
        left = until - time.monotonic()
        if enough or left <= 0:
            return tasks
        pause = min(left, 1.0 if unfinished else POLL)
        project_mill().runtime.job_store.wait_for(unfinished, pause)
        if not unfinished:
            time.sleep(min(left, POLL))


def split_group(group_id: str) -> tuple[list[Task], list[str]]:
    """The ended tasks of a group, and the ids of its unfinished tasks, oldest first."""
    mill = project_mill()
    gone = _ungrouped(mill, group_id)
    found = _records(mill, group_tag(group_id))
    records = sorted((each for each in found if each.envelope.id not in gone), key=_place)
    ended = [Task.of_record(mill, record) for record in records if record.state.finished]
    return ended, [record.envelope.id for record in records if not record.state.finished]


def _ungrouped(mill: DjangoMill, group_id: str) -> set[str]:
    """The ids of the tasks that have left a group."""
    found = _records(mill, ungrouped_tag(group_id))
    return {task_id for record in found for task_id in arguments_of(record.envelope)[0]}


def _records(mill: DjangoMill, tag: str) -> list[Record]:
    ids = [job.id for job in mill.jobs(tag=tag)]
    return [record for record in mill.runtime.job_store.wait_for(ids, 0) if record is not None]


def _place(record: Record) -> tuple[str, int]:
    """The sort key of a job in its group: the time in its id, and its number in a chain."""
    job_id, _, number = record.envelope.id.partition(".")
    return job_id, int(number) if number.isdigit() else 0


def count_group(group_id: str, failures: bool = False, cached: bool = False) -> int:
    """The number of ended tasks of a group; with ``failures`` the number of failed tasks."""
    ended, _ = split_group(group_id)
    return sum(not task.success for task in ended) if failures else len(ended)


def delete_cached(task_id: str, broker: Any = None) -> bool:
    """Delete a task."""
    return project_mill().job(task_id).delete()


def queue_size(broker: Any = None) -> int:
    """The number of jobs that wait for a worker."""
    return sum(queue.ready for queue in project_mill().queues())
