"""The page of one job: its life as a waterfall, all facts that the store has, and its actions."""

from __future__ import annotations

import keyword
import pprint
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from tidemill.app import Tidemill
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.client.arguments import pack_checked_call, summary
from tidemill.client.compositions import jobs_before, size_of
from tidemill.client.explain import explain_in, why_ready, with_interrupted_runs
from tidemill.client.puts import seal
from tidemill.core.clock import clock
from tidemill.core.codec import pack_plain_call, unpack
from tidemill.core.config import check_name
from tidemill.core.envelope import Envelope, Ref, priority_of, rank_of
from tidemill.core.job import GROUP, Owner, Placed, Record, State
from tidemill.core.scoreboard import read_runs
from tidemill.dashboard.job_search import Listed
from tidemill.dashboard.jobs import ACTIONS, act, alter_form, target_of
from tidemill.dashboard.look import Look
from tidemill.dashboard.page import Forbidden, Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.dashboard.waterfall import Cause, Known, bars_of, spans_of
from tidemill.errors import (
    CodecError,
    InvalidOption,
    JobNotFound,
    JobPruned,
    ResultNotKept,
    TidemillError,
)

routes = Routes()

_LOG_SHOWN = 500
_PRIORITIES = (-100.0, 100.0)


def _record(page: Page, job_id: str) -> Record:
    """The record of a job. Raises JobPruned for a job that is no longer kept, or JobNotFound."""
    record = page.mill.broker.get(job_id)
    if record is None and page.mill.broker.was_here(job_id):
        raise JobPruned(f"job {job_id} finished and is no longer kept, or was deleted")
    if record is None:
        raise JobNotFound(f"no job has the id {job_id}")
    return record


@routes.get("/jobs/{job_id}")
def job(page: Page, job_id: str) -> Response:
    record = _record(page, job_id)
    values = facts(page, record)
    same = Filter(task=record.envelope.task, queue=record.envelope.queue)
    return page.render(
        "job.html",
        title=f"{record.envelope.task or 'Message'} {job_id}",
        every=2 if not record.state.finished else 30,
        others=latest_jobs(page.mill, same, without=job_id),  # other runs
        actions=ACTIONS,
        **values,
    )


def facts(page: Page, record: Record) -> dict[str, Any]:
    """The values for the page of a job, and for its file."""
    mill, now, sees = page.mill, clock.wall(), page.sees_arguments
    given, runs = record, with_interrupted_runs(record)  # without values it has no log
    record = record if sees else record.without_values()
    envelope, links = record.envelope, record.envelope.links
    known = known_of(mill, record, page.look, now)
    return {
        "record": record,
        "envelope": envelope,
        "now": now,
        "why": known.cause.detail if known.cause else explain_in(mill.broker, record),
        "bars": bars_of(spans_of(record if sees else runs.without_values(), known)),
        "priority": priority_of(record.rank),
        "parents": known.parents,
        "parents_missing": len(set(links.inputs) - {r.envelope.id for r in known.parents})
        if links
        else 0,
        "children": relatives(mill, links.next) if links else [],
        "whole": whole_of(mill, record),
        "members": size_of(mill.broker, given) if envelope.task == GROUP else None,
        "arguments": arguments_of(mill, envelope) if sees else [],
        "result": result_of(record) if sees else None,
        "python": as_python(record) if sees else "",
        "curl": as_curl(record, _server_url(page)) if sees else "",
        "origin": given.envelope.headers.get(RERUN_OF, ""),
        "log": record.log[-_LOG_SHOWN:],
        "log_hidden": max(0, len(record.log) - _LOG_SHOWN),
        "is_group": envelope.task == GROUP,
    }


def _server_url(page: Page) -> str:
    """The URL of the job server for ``curl``: this host, if its name has only plain characters."""
    host = page.request.headers.get("host", "")
    if not re.fullmatch(r"[A-Za-z0-9.\-\[\]:]{1,255}", host):
        host = "127.0.0.1:8333"
    return f"{'https' if page.request.secure else 'http'}://{host}"


@routes.get("/jobs/{job_id}/file")
def job_file(page: Page, job_id: str) -> Response:
    """One job as an HTML file that loads no other file, for a report of an error."""
    record = _record(page, job_id)
    response = page.render("job_file.html", title=f"Job {job_id}", **facts(page, record))
    name = re.sub(r"[^\w.-]", "_", job_id, flags=re.ASCII)[:80]
    response.headers["content-disposition"] = f'attachment; filename="job-{name}.html"'
    return response


# -- acting ----------------------------------------------------------------------------------------


@routes.post("/jobs/{job_id}/act")
def act_on_job(page: Page, job_id: str) -> Response:
    name = page.request.field("act")
    if name not in ACTIONS:
        raise InvalidOption(f"choose an action: {', '.join(ACTIONS)}")
    page.need(ACTIONS[name].role)
    target = target_of(page.request, name)
    done = act(page.mill, name, [job_id], target)
    if done.done:
        page.audit(f"{ACTIONS[name].past} job{target.noted}", job_id)
    kind = "ok" if done.done else "error"
    if name == "delete" and done.done:
        return page.redirect(page.url("/jobs"), f"deleted job {job_id}", kind)
    text = f"{ACTIONS[name].past} the job" if done.done else done.reasons[0][0]
    if page.request.field("back"):
        return page.back(text, "/jobs", kind)
    return page.redirect(page.url("/jobs/{}", job_id), text, kind)


@routes.get("/jobs/{job_id}/alter", Role.OPERATOR)
def alter(page: Page, job_id: str) -> Response:
    record = _record(page, job_id)
    return alter_form(page, page.url("/jobs/{}/act", job_id), [record.envelope.id], record)


# -- edit and run again ----------------------------------------------------------------------------


def _need_edit(page: Page) -> None:
    if not page.edits_jobs:
        role = max(page.dashboard.edit_jobs, page.dashboard.see_arguments).name.lower()
        raise Forbidden(f"to edit a job and run it again needs the role {role}")


@routes.get("/jobs/{job_id}/edit")
def edit(page: Page, job_id: str) -> Response:
    """A form with the arguments of a job, to run it again with changes."""
    _need_edit(page)
    record = _record(page, job_id)
    text, problem = "", ""
    try:
        text = _as_json(record.envelope)
    except (CodecError, InvalidOption) as error:
        problem = str(error)
    return _form(page, record, text, problem)


def _form(page: Page, record: Record, text: str, problem: str, **given: str) -> Response:
    envelope = record.envelope
    values = {"queue": envelope.queue, "priority": f"{priority_of(record.rank):g}", **given}
    return page.render(
        "job_edit.html",
        400 if given and problem else 200,
        title=f"Edit {envelope.id}",
        still=True,
        envelope=envelope,
        text=text,
        problem=problem,
        values=values,
    )


def _as_json(envelope: Envelope) -> str:
    """The arguments as JSON to edit. Raises CodecError, or InvalidOption if JSON lacks a type."""
    if envelope.task in ("", GROUP):
        raise InvalidOption("only the job of a task can be edited; put messages with the API")
    args, kwargs = call_of(envelope)
    document = {"args": args, "kwargs": kwargs}
    encoded = b""
    try:
        encoded = msgspec.json.encode(document)
        same = msgspec.json.decode(encoded) == document
    except (TypeError, ValueError, OverflowError):
        same = False
    if not same:
        raise InvalidOption(
            "the arguments have a type that JSON lacks, such as a datetime, a tuple or bytes; "
            "copy the call as Python instead"
        )
    return msgspec.json.format(encoded, indent=2).decode()


@routes.post("/jobs/{job_id}/edit", Role.OPERATOR)
def run_again(page: Page, job_id: str) -> Response:
    """Put a new job with the edited arguments; its header has the id of the edited job."""
    _need_edit(page)
    record = _record(page, job_id)
    request = page.request
    text = request.field("arguments")
    given = {"queue": request.field("queue"), "priority": request.field("priority")}
    try:
        envelope = _edited(page, record, text, given)
    except (InvalidOption, CodecError, TypeError) as error:
        return _form(page, record, text, str(error), **given)
    handle = page.mill.runtime.put([envelope])[0]
    if handle.placed == Placed.KEPT:
        text = f"nothing was put: an unfinished job has the key {envelope.key}"
        return page.redirect(page.url("/jobs/{}", handle.id), text, "error")
    page.audit("ran job again with edits", f"{job_id} as {handle.id}")
    return page.redirect(page.url("/jobs/{}", handle.id), f"put again as this job, from {job_id}")


def _edited(page: Page, record: Record, text: str, given: dict[str, str]) -> Envelope:
    mill, old = page.mill, record.envelope
    _as_json(old)
    if old.signature and not mill.runtime.keys:
        raise InvalidOption(
            "the jobs of this store are signed, and the dashboard has no key; run it with "
            "--app, or mount it in the app"
        )
    args, kwargs = _call_in(text)
    task = mill.tasks.get(old.task)
    if task is not None:
        task.arguments.check(args, kwargs)
    body = pack_plain_call(tuple(args), kwargs)
    if body is None:
        arguments = task.arguments if task else None
        body = pack_checked_call(old.task, arguments, tuple(args), kwargs)
    envelope = msgspec.structs.replace(
        old,
        id="",
        queue=check_name("queue", given["queue"]),
        rank=_rank(given["priority"], record),
        body=body,
        text=summary(tuple(args), kwargs),
        delay=0.0,
        at=0.0,
        links=None,
        planned=None,
        signature=b"",
        headers={**old.headers, RERUN_OF: old.id},
    )
    return seal(mill.runtime, envelope)


def _call_in(text: str) -> tuple[list[Any], dict[str, Any]]:
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidOption(f"the arguments are no JSON: {error}") from None
    shape = isinstance(document, dict) and set(document) == {"args", "kwargs"}
    if not shape or not isinstance(document["args"], list):
        raise InvalidOption('write the arguments as {"args": [...], "kwargs": {...}}')
    if not isinstance(document["kwargs"], dict):
        raise InvalidOption("kwargs must be an object, with a value for each name")
    return document["args"], document["kwargs"]


def _rank(text: str, record: Record) -> int:
    try:
        priority = float(text)
    except ValueError:
        raise InvalidOption(f"priority must be a number, not {text[:20]!r}") from None
    if priority == priority_of(record.rank):
        return record.rank
    if not _PRIORITIES[0] <= priority <= _PRIORITIES[1]:
        raise InvalidOption(f"priority must be from -100 to 100, not {text[:20]}")
    return rank_of(priority)


RERUN_OF = "rerun-of"  # the header of an edited repeat of a job: the id of the original job
_RELATIVES_MOST = 50
_LATEST = 10
_LOOK = 3000  # jobs that the search for the latest jobs of a task reads


class Shown(msgspec.Struct, frozen=True):
    """A value as text, in full, or the reason why the value cannot be shown."""

    name: str
    text: str
    is_readable: bool = True


def call_of(envelope: Envelope) -> tuple[list[Any], dict[str, Any]]:
    """The arguments in the body of a task's job, as plain data. Raises CodecError."""
    if envelope.pickled:
        raise CodecError("the arguments are pickled; only a worker with the key opens them")
    body = unpack(envelope.body) if envelope.body else [[], {}]
    if not (isinstance(body, (list, tuple)) and len(body) == 2 and isinstance(body[1], dict)):
        raise CodecError("the body is no call: another program put this job")
    return list(body[0]), dict(body[1])


def arguments_of(mill: Tidemill, envelope: Envelope) -> list[Shown]:
    """The arguments of a job, or the body of a message, each in full."""
    if envelope.is_message:
        return [_body_of(envelope)]
    try:
        args, kwargs = call_of(envelope)
        return [Shown(name, in_full(value)) for name, value in _named(mill, envelope, args, kwargs)]
    except CodecError as error:
        return [Shown("", str(error), is_readable=False)]


def _body_of(envelope: Envelope) -> Shown:
    if envelope.pickled:
        return Shown("body", "the body is pickled; only a consumer with the key opens it", False)
    try:
        return Shown("body", in_full(unpack(envelope.body)) if envelope.body else "None")
    except CodecError:
        return Shown("body", envelope.body.decode("utf-8", "backslashreplace"))


def _named(
    mill: Tidemill, envelope: Envelope, args: list[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    task = mill.tasks.get(envelope.task)
    try:
        names = [each.name for each in task.arguments.each(args, kwargs)] if task else []
    except (TypeError, IndexError):
        names = []
    for place, value in enumerate(args):
        yield names[place] if place < len(names) else f"[{place}]", value
    yield from kwargs.items()


def in_full(value: Any) -> str:
    """A value as Python text over several lines, never shortened."""
    if isinstance(value, str) and "\n" in value:
        return value
    return pprint.pformat(value, width=100, sort_dicts=False)


def result_of(record: Record) -> Shown | None:
    if record.state is not State.SUCCEEDED:
        return None
    try:
        return Shown("result", in_full(record.result))
    except (CodecError, ResultNotKept) as error:
        return Shown("result", str(error), is_readable=False)


# -- causes ----------------------------------------------------------------------------------------


def known_of(mill: Tidemill, record: Record, look: Look, now: float) -> Known:
    """The facts about a job that the store has besides its record, at this moment."""
    cause = cause_of(mill, record, look) if record.state is State.READY else None
    started = started_at(record, look.owners) if record.state is State.RUNNING else 0.0
    return Known(now, cause, started, _parents(mill, record))


def cause_of(mill: Tidemill, record: Record, look: Look) -> Cause:
    queue = record.envelope.queue
    row = look.queue(queue) or QueueStats(name=queue)
    return Cause(*why_ready(mill.broker, record, row, len(look.serving(queue))))


def started_at(record: Record, owners: Sequence[Owner]) -> float:
    """When the present run of a job began, by the scoreboard of its worker; 0 if nobody knows."""
    for owner in owners:
        if owner.name == record.worker and owner.board:
            try:
                runs = read_runs(owner.board, owner.id)
            except (TidemillError, OSError):
                runs = None
            if runs and record.token in runs:
                return runs[record.token][1]
    return 0.0


# -- relatives -------------------------------------------------------------------------------------


def _parents(mill: Tidemill, record: Record) -> list[Record]:
    """The jobs that a job waits or waited for, without jobs that are no longer kept."""
    links = record.envelope.links
    if links is None:
        return []
    found = relatives(mill, links.inputs)
    return [*found, *jobs_before(mill.broker, record)][:_RELATIVES_MOST]


def relatives(mill: Tidemill, ids: Sequence[str]) -> list[Record]:
    """The jobs of these ids that are still kept; at most 50."""
    if not ids:
        return []
    found = mill.broker.wait_for(ids[:_RELATIVES_MOST], 0)
    return [record for record in found if record is not None]


def whole_of(mill: Tidemill, record: Record) -> Record | None:
    """The group, chain or flow that a job is a part of."""
    job_id = record.envelope.id
    if record.envelope.links is None:
        return None
    while "." in job_id:
        job_id = job_id.rpartition(".")[0]
        found = mill.broker.get(job_id)
        if found is not None:
            return found
    return record if record.envelope.task == GROUP else None


def latest_jobs(mill: Tidemill, what: Filter, without: str = "") -> Listed:
    """The latest jobs of a filter, apart from the job ``without``, from a short search."""
    found = mill.jobs(msgspec.structs.replace(what, look=_LOOK)).page(limit=_LATEST + 1)
    records = [each for each in found.records if each.envelope.id != without][:_LATEST]
    cursor = "" if len(records) == _LATEST else found.cursor
    return Listed(records, cursor, is_full=not cursor)


_IMPORTS = {  # for the names in the ``repr`` of values that :func:`unpack` gives
    "datetime": "import datetime",
    "zoneinfo": "import zoneinfo",
    "Decimal": "from decimal import Decimal",
    "UUID": "from uuid import UUID",
    "inf": "from math import inf",
    "nan": "from math import nan",
}


def _call(envelope: Envelope) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a job that can be put again alone. Raises CodecError or InvalidOption."""
    if envelope.task == GROUP:
        raise InvalidOption(
            "this job stands for a group or a flow; enqueue the group or the flow again"
        )
    args, kwargs = call_of(envelope)
    if _has_results([args, kwargs]):
        raise InvalidOption(
            "an argument is the result of another job; only its flow can put this job"
        )
    return args, kwargs


def _has_results(value: Any) -> bool:
    """True when a value of a call has the result of another job in it."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Ref) or (
        isinstance(value, (list, tuple)) and any(map(_has_results, value))
    )


def as_python(record: Record) -> str:
    """Python in one line that puts the same job again, with its imports; or a comment."""
    envelope, priority = record.envelope, priority_of(record.rank)
    options = {
        "queue": "" if envelope.is_message else envelope.queue,
        "priority": priority if priority or record.rank != envelope.rank else None,
        "key": envelope.key,
        "tags": [] if envelope.is_message else list(envelope.tags),
    }
    given = [f"{name}={value!r}" for name, value in options.items() if value not in ("", None, [])]
    try:
        if envelope.is_message:
            values = repr(unpack(envelope.body) if envelope.body else None)
            line = f"mill.queue({envelope.queue!r}).put({', '.join([values, *given])})"
        else:
            args, kwargs = _call(envelope)
            parts = [*map(repr, args), *_keywords(kwargs)]
            values = ", ".join(parts)
            call = f"mill.call({', '.join([repr(envelope.task), *parts])})"
            line = f"mill.enqueue({call}.using({', '.join(given)}))"
    except (CodecError, InvalidOption, ValueError) as error:  # ValueError: an endless number
        return f"# {error}"
    imports = [_IMPORTS[name] for name in _IMPORTS if re.search(rf"\b{name}\b", values)]
    return "; ".join([*imports, line])


def _keywords(kwargs: dict[str, Any]) -> list[str]:
    if all(str(name).isidentifier() and not keyword.iskeyword(str(name)) for name in kwargs):
        return [f"{name}={value!r}" for name, value in kwargs.items()]
    return [f"**{kwargs!r}"]


def as_curl(record: Record, base: str) -> str:
    """The request that puts the same job through the job server at ``base``, or a comment."""
    envelope, priority = record.envelope, priority_of(record.rank)
    document: dict[str, Any]
    try:
        if envelope.is_message:
            document = {"queue": envelope.queue, "body": unpack(envelope.body)}
        else:
            args, kwargs = _call(envelope)
            document = {"task": envelope.task, "args": args, "kwargs": kwargs}
            document["queue"] = envelope.queue
        if priority or record.rank != envelope.rank:
            document["priority"] = priority
        text = msgspec.json.encode(document).decode()
        if msgspec.json.decode(text) != document:
            return "# JSON lacks a type of these arguments; use Python"
    except (CodecError, InvalidOption, TypeError, ValueError, OverflowError) as error:
        return f"# {error}"
    return f"curl --json {shlex.quote(text)} {shlex.quote(base + '/v1/jobs')}"
