"""The page of one job: its life as a waterfall, and all facts that the store has about the job."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response

from tidemill.client.arguments import pack_checked_call, summary
from tidemill.client.compositions import size_of
from tidemill.client.explain import explain_in
from tidemill.client.puts import seal
from tidemill.client.trail import with_interrupted_runs
from tidemill.core.clock import clock
from tidemill.core.codec import pack_plain_call
from tidemill.core.config import check_name
from tidemill.core.envelope import Envelope
from tidemill.core.errors import CodecError, InvalidOption, JobNotFound, JobPruned
from tidemill.core.job import GROUP, Placed, Record
from tidemill.core.priority import priority_of, rank_of
from tidemill.dashboard.job_actions import ACTIONS, act
from tidemill.dashboard.job_facts import (
    RERUN_OF,
    arguments_of,
    call_of,
    known_of,
    other_runs,
    relatives,
    result_of,
    whole_of,
)
from tidemill.dashboard.page import Forbidden, Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.dashboard.same_again import as_curl, as_python
from tidemill.dashboard.target import alter_form, target_of
from tidemill.dashboard.waterfall import WIDTH, bars_of, spans_of

routes = Routes()

_LOG_SHOWN = 500
_PRIORITIES = (-100.0, 100.0)


def _record(page: Page, job_id: str) -> Record:
    """The record of a job.

    Raises:
        JobNotFound: there is no such job, or it is no longer kept.
    """
    record = page.mill.broker.get(job_id)
    if record is None and page.mill.broker.was_here(job_id):
        raise JobPruned(f"job {job_id} finished and is no longer kept, or was deleted")
    if record is None:
        raise JobNotFound(f"no job has the id {job_id}")
    return record


@routes.get("/jobs/{job_id}")
def job(page: Page, job_id: str) -> Response:
    """One job."""
    record = _record(page, job_id)
    values = facts(page, record)
    return page.render(
        "job.html",
        title=f"{record.envelope.task or 'Message'} {job_id}",
        section="/jobs",
        every=2 if not record.state.finished else 30,
        others=other_runs(page.mill, record),
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
        "width": WIDTH,
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
    """Retry, cancel, stop, alter or delete this job."""
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
    """A form for another priority or queue of this job."""
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
        section="/jobs",
        still=True,
        record=record,
        envelope=envelope,
        text=text,
        problem=problem,
        values=values,
        queues=[row.name for row in page.look.queues],
    )


def _as_json(envelope: Envelope) -> str:
    """The arguments as JSON to edit.

    Raises:
        CodecError: the arguments cannot be decoded.
        InvalidOption: they have a type that JSON lacks.
    """
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
    """The envelope of the new job.

    Raises:
        InvalidOption, CodecError, TypeError: the arguments or options cannot be used.
    """
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
