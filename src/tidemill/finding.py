"""Finding jobs: handles of all that match, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tidemill.brokers.base import Filter
from tidemill.config import check_name
from tidemill.errors import InvalidOption
from tidemill.handle import Job
from tidemill.job import State
from tidemill.task import Task

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["Found"]

_PAGE = 200


class Found:
    """Handles of jobs that match, newest first, for ``for`` and ``async for``; read as needed.

    Args:
        task: a task, or the name of one.
        group: the id of a group, chain or flow: all its parts.
        state: a state, or several.
        queue, key, tag: which they have.
        text: is in what a job shows of its arguments.

    Raises:
        InvalidOption: a state is none, or a name is none.
    """

    def __init__(
        self,
        mill: Tidemill,
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
