"""Search jobs: iterate over the handles of all matching jobs, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from tidemill.brokers.contract.inspection import Filter
from tidemill.client.job_handle import Job
from tidemill.client.runtime import Runtime
from tidemill.client.task import Task
from tidemill.core.config import check_name
from tidemill.core.errors import InvalidOption
from tidemill.core.job import State

__all__ = ["Found"]

_PAGE = 200


class Found:
    """Handles of the matching jobs, newest first, for ``for`` and ``async for``.

    Pages are read from the store as the iteration goes on.

    Args:
        task: a task, or its name.
        group: the id of a group, chain or flow; its jobs match.
        state: a state, or a list of states.
        queue, key, tag: the queue, the key, or a tag of the job.
        text: a part of the text that shows a job's arguments.

    Raises:
        InvalidOption: there is no such state, or a name is invalid.
    """

    def __init__(
        self,
        mill: Runtime,
        *,
        task: str | Task[..., Any] = "",
        group: str = "",
        state: str | Iterable[str] = (),
        queue: str = "",
        key: str = "",
        tag: str = "",
        text: str = "",
    ) -> None:
        self._mill = mill
        self._what = Filter(
            states=_states(state),
            queue=queue,
            task=task.name if isinstance(task, Task) else task,
            key=key,
            tag=tag,
            text=text,
            id_prefix=f"{check_name('group', group)}." if group else "",
        )

    def __iter__(self) -> Iterator[Job[Any]]:
        cursor: str | None = ""
        while cursor is not None:
            jobs, cursor = self._page(cursor)
            yield from jobs

    async def __aiter__(self) -> AsyncIterator[Job[Any]]:
        cursor: str | None = ""
        while cursor is not None:
            jobs, cursor = await self._mill.threaded(self._page, cursor)
            for job in jobs:
                yield job

    def _page(self, cursor: str) -> tuple[list[Job[Any]], str | None]:
        page = self._mill.broker.find(self._what, _PAGE, cursor)
        jobs: list[Job[Any]] = []
        for record in page.records:
            jobs.append(Job(self._mill, record.envelope.id))
            jobs[-1].remember(record)
        return jobs, page.cursor or None


def _states(given: str | Iterable[str]) -> frozenset[State]:
    try:
        return frozenset(map(State, [given] if isinstance(given, str) else given))
    except ValueError as error:
        raise InvalidOption(f"state must be one of {', '.join(State)}: {error}") from None
