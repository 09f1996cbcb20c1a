"""The list of jobs: search, select, act on the selected jobs, export."""

from __future__ import annotations

import collections
import csv
import io
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.compositions import (
    alter_jobs,
    cancel_jobs,
    delete_jobs,
    records_of,
    retry_jobs,
)
from tidemill.client.explain import why_not_altered, why_not_run
from tidemill.core.config import check_alter
from tidemill.core.envelope import priority_of
from tidemill.core.job import WAITING_STATES, Record, State
from tidemill.core.words import counted
from tidemill.dashboard.http import LongResponse, Request
from tidemill.dashboard.job_search import (
    FIELDS,
    SECRET,
    Count,
    JobQuery,
    count_of,
    counted_by_queues,
    need_lists,
    page_of,
    pages_of,
    parse,
)
from tidemill.dashboard.page import Forbidden, Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.errors import InvalidOption

routes = Routes()

PAGE = 50
_SIZES = (25, 50, 100, 200)
_ID_LEAST = 6
Exported = dict[str, object]

_CSV = (
    *("id", "task", "queue", "state", "created", "finished", "attempt", "worker", "error"),
    *("key", "summary"),
)


def query_of(page: Page, text: str) -> JobQuery:
    """The parsed search of a user. Raises Forbidden if the search would reveal arguments."""
    query = parse(text)
    secret = [field for field in query.tokens if field in SECRET]
    if secret and not page.sees_arguments:
        raise Forbidden(f"your role does not see arguments, so it cannot search by {secret[0]}:")
    return query


@routes.get("/jobs")
def jobs(page: Page) -> Response:
    text, cursor = page.request.arg("q").strip(), page.request.arg("cursor")
    if not text and not page.has(Feature.INSPECT):  # without INSPECT only failed jobs are listed
        return page.redirect(page.url("/jobs", q="state:failed"))
    if text and not cursor and (job_id := _only_job(page, text)):
        return page.redirect(page.url("/jobs/{}", job_id))
    error, listed = "", None
    query = JobQuery()
    try:
        query = query_of(page, text)
        listed = page_of(page.mill, query, _size(page), cursor)
    except InvalidOption as problem:
        error = str(problem)
    return page.render(
        "jobs.html",
        title="Jobs",
        text=text,
        query=query,
        error=error,
        listed=listed,
        count=_count(page, query) if listed is not None and listed.is_full else None,
        counted=_counted(page),
        states=list(State),
        numbers=_state_numbers(page, query),
        fields=FIELDS,
        actions=ACTIONS,
    )


def _size(page: Page) -> int:
    given = page.request.arg("size")
    return int(given) if given in map(str, _SIZES) else PAGE


def _only_job(page: Page, text: str) -> str:
    """The id of the only job whose id begins or ends with a one-word search; else empty."""
    if any(sign in text for sign in ' :"'):
        return ""
    if page.mill.broker.get(text) is not None:
        return text
    if len(text) < _ID_LEAST or Feature.INSPECT not in page.mill.broker.features:
        return ""
    for what in (Filter(id_prefix=text, look=20_000), Filter(id_suffix=text, look=20_000)):
        found = page.mill.jobs(what).page(limit=2).records
        if len(found) == 1:
            return found[0].envelope.id
    return ""


def _count(page: Page, query: JobQuery) -> Count:
    patience = 5.0 if page.request.arg("count") else 0.04
    return count_of(page.mill, query, page.look.queues, patience)


def _counted(page: Page) -> int | None:
    """The number that the link to this page showed. History also counts jobs no longer kept."""
    given = page.request.arg("counted")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 16 else None


def _state_numbers(page: Page, query: JobQuery) -> dict[str, int]:
    """The number of jobs in each state, as far as the numbers of the queues tell it."""
    searches = {state.value: query.with_value("state", state.value) for state in State}
    told = {name: counted_by_queues(each, page.look.queues) for name, each in searches.items()}
    return {name: number for name, number in told.items() if number is not None}


@routes.post("/jobs/act")
def act_on_jobs(page: Page) -> Response:
    """Act on the selected jobs, or go to the preview of the action on all jobs that match."""
    name, ids = page.request.field("act"), page.request.form_data.getlist("id")
    if name not in ACTIONS:
        raise InvalidOption(f"choose an action: {', '.join(ACTIONS)}")
    if page.request.field("all"):
        text = page.request.field("q")
        return page.redirect(page.url("/bulk/new", q=text, act=name))
    if not ids:
        return page.back("select jobs first: with the boxes, or with j, k and x", "/jobs", "error")
    page.need(ACTIONS[name].role)
    if ACTIONS[name].asks and "to_queue" not in page.request.form_data:
        return alter_form(page, page.url("/jobs/act"), ids)
    target = target_of(page.request, name)
    done = act(page.mill, name, ids, target)
    if done.done:
        what = f"{ACTIONS[name].past} jobs{target.noted}"
        page.audit(what, ", ".join(ids[:5]), done.done)
    return page.back(done.text(name), "/jobs", "ok" if done.done or not done.refused else "error")


@routes.get("/jobs.{kind}", Role.VIEWER)
def export(page: Page, kind: str) -> Response:
    """All jobs that match, as JSON (an object a line) or CSV."""
    query = query_of(page, page.request.arg("q"))
    need_lists(page.mill, query)
    pages = ([_exported(page, record) for record in some] for some, _ in pages_of(page.mill, query))
    if kind == "json":
        return _file(_json_lines(pages), "application/x-ndjson", "jobs.json")
    if kind == "csv":
        return _file(_csv_lines(pages), "text/csv; charset=utf-8", "jobs.csv")
    raise InvalidOption("export jobs as json or csv")


def _exported(page: Page, record: Record) -> Exported:
    return (record if page.sees_arguments else record.without_values()).public()


def _file(parts: Generator[bytes], media: str, name: str) -> Response:
    disposition = f'attachment; filename="{name}"'
    headers = {"content-disposition": disposition, "cache-control": "no-store"}
    return LongResponse(parts, headers, media)


def _json_lines(pages: Iterator[list[Exported]]) -> Generator[bytes]:
    """A part for each page of the store; the part is empty when no job of the page matches."""
    for rows in pages:
        yield b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _csv_lines(pages: Iterator[list[Exported]]) -> Generator[bytes]:
    """A part for each page of the store. The first part begins with the names of the columns."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(_CSV)
    for rows in pages:
        writer.writerows([_cell(row[name]) for name in _CSV] for row in rows)
        yield out.getvalue().encode()
        out.seek(0)
        out.truncate()


def _cell(value: object) -> str:
    """A value as a cell. A text that a spreadsheet would run as a formula begins with a quote."""
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


RETRY_FIRST = 5  # failed jobs that are retried first; if they succeed, the others follow
_REASONS_SHOWN = 3


class Target(msgspec.Struct, frozen=True):
    """The priority and the queue that an action gives to jobs."""

    rank: int | None = None  # the stored form of the new priority; None leaves the priority
    queue: str | None = None  # the queue to move the jobs to; None leaves the queue
    text: str = ""  # both in words; empty for an action other than ``alter``

    @property
    def noted(self) -> str:
        """The end of a note in the audit list; empty for an action other than ``alter``."""
        return f" to {self.text}" if self.text else ""


class Action(NamedTuple):
    """An action on jobs: its words, icon and function, its least role, and states of its jobs."""

    label: str
    past: str
    icon: str
    role: Role
    states: frozenset[State]
    do: Callable[[Tidemill, Sequence[str], Target], list[bool]]
    question: str = ""
    asks: bool = False  # a separate page asks the user for the target


_UNFINISHED = frozenset({State.WAITING, State.SCHEDULED, State.READY, State.RUNNING})

ACTIONS = {
    "retry": Action(
        *("Retry", "retried", "retry", Role.OPERATOR),
        frozenset({State.FAILED, State.CANCELLED, State.EXPIRED, State.SCHEDULED}),
        lambda mill, ids, _: retry_jobs(mill.runtime, ids),
    ),
    "cancel": Action(
        *("Cancel", "cancelled", "ban", Role.OPERATOR, _UNFINISHED),
        lambda mill, ids, _: cancel_jobs(mill.runtime, ids),
        "Cancel? Jobs that have not started never will; running jobs are asked to stop.",
    ),
    "terminate": Action(
        *("Stop now", "stopped", "stop", Role.OPERATOR, _UNFINISHED),
        lambda mill, ids, _: cancel_jobs(mill.runtime, ids, terminate=True),
        "Stop now? Running jobs are interrupted within a second.",
    ),
    "alter": Action(
        *("Change queue or priority", "altered", "up", Role.OPERATOR, WAITING_STATES),
        lambda mill, ids, to: alter_jobs(mill.runtime, ids, rank=to.rank, queue=to.queue),
        asks=True,
    ),
    "delete": Action(
        *("Delete", "deleted", "trash", Role.OPERATOR, frozenset(State)),
        lambda mill, ids, _: delete_jobs(mill.runtime, ids),
        "Delete? The jobs are gone with their results, in any state.",
    ),
}


class Done(NamedTuple):
    """What an action did: the number of jobs changed and refused, and the reasons by frequency."""

    done: int
    refused: int
    reasons: list[tuple[str, int]]

    def text(self, name: str) -> str:
        text = f"{ACTIONS[name].past} {counted(self.done, 'job')}"
        if self.refused:
            text += f"; {self.refused:,} refused: "
            shown = grouped(self.refused, dict(self.reasons[:_REASONS_SHOWN]))
            text += (
                shown[0][0] if len(shown) == 1 else "; ".join(f"{n:,}: {why}" for why, n in shown)
            )
        return text


def grouped(refused: int, reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """Reasons with the numbers of their jobs, and a last line for the jobs of other reasons."""
    others = refused - sum(reasons.values())
    return [*reasons.items(), *([("other reasons", others)] if others > 0 else [])]


def act(
    mill: Tidemill,
    name: str,
    ids: Sequence[str],
    target: Target = Target(),  # noqa: B008 - frozen
) -> Done:
    """Act on jobs in one call of the store. After BrokerUnavailable the jobs may have changed."""
    unique = list(dict.fromkeys(ids))
    if name == "alter":
        mill.runtime.features.need(Feature.ALTER, "alter")
    answers = ACTIONS[name].do(mill, unique, target)
    refused = [job_id for job_id, answer in zip(unique, answers, strict=True) if not answer]
    records = records_of(mill.broker, refused)
    reasons = collections.Counter(_why(mill, name, record, target) for record in records)
    return Done(sum(answers), len(refused), reasons.most_common())


def _why(mill: Tidemill, name: str, record: Record | None, target: Target) -> str:
    """Why a job was refused. The text leaves out the key of the job, which may be secret."""
    if record is None:
        return "it is no longer kept"
    if name == "retry":
        return why_not_run(mill.runtime, record).replace(f" {record.envelope.key!r}", "")
    if name == "alter":
        return why_not_altered(record, target.queue)
    return f"it {record.state} already" if record.state.finished else f"it is {record.state}"


def target_of(request: Request, action: str) -> Target:
    """The target in a form. An empty field changes nothing; one of the two must have a value."""
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
        still=True,
        where=where,
        ids=ids,
        record=record,
        priority=priority_of(record.rank) if record is not None else None,
        back=page.request.field("back") or page.request.root + "/jobs",
    )
