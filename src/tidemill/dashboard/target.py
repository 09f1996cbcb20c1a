"""The target of the action ``alter``: the priority and the queue that jobs get."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from tidemill.core.config import check_alter
from tidemill.core.errors import InvalidOption
from tidemill.core.job import Record
from tidemill.core.priority import priority_of
from tidemill.dashboard.page import Page
from tidemill.dashboard.request import Request


class Target(msgspec.Struct, frozen=True):
    """The priority and the queue that an action gives to jobs.

    Attributes:
        rank: the stored form of the new priority; None leaves the priority.
        queue: the queue to move the jobs to; None leaves the queue.
        text: the priority and the queue in words; empty for an action other than ``alter``.
    """

    rank: int | None = None
    queue: str | None = None
    text: str = ""

    @property
    def noted(self) -> str:
        """The end of a note in the audit list; empty for an action other than ``alter``."""
        return f" to {self.text}" if self.text else ""


def target_of(request: Request, action: str) -> Target:
    """The target in a form; an empty field changes nothing.

    Raises:
        InvalidOption: a value cannot be used, or the form of ``alter`` has none.
    """
    if action != "alter":
        return Target()
    priority, queue = request.field("to_priority").strip(), request.field("to_queue").strip()
    try:
        number = float(priority) if priority else None
    except ValueError:
        raise InvalidOption(f"priority must be a number, not {priority[:20]!r}") from None
    rank, name = check_alter(number, queue or None)
    parts = [f"queue {queue}" if queue else "", f"priority {number:g}" if priority else ""]
    return Target(rank, name, ", ".join(filter(None, parts)))


def alter_form(
    page: Page, where: str, ids: Sequence[str], record: Record | None = None
) -> Response:
    """The page that asks for the target of jobs; ``record`` is given when there is a single job."""
    return page.render(
        "jobs_alter.html",
        title="Change queue or priority",
        section="/jobs",
        still=True,
        where=where,
        ids=ids,
        record=record,
        priority=priority_of(record.rank) if record is not None else None,
        queues=[row.name for row in page.look.queues],
        back=page.request.field("back") or page.request.root + "/jobs",
    )
