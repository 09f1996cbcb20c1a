"""Hooks of schemathesis for a run of :mod:`.fuzz`: they insert existing names, and log all calls.

Random names name nothing. So the hooks replace some of them with names of existing jobs and queues
before a call. The choice depends only on the name and on earlier answers: a run with the same seed
against a new server makes the same calls, apart from names that the server makes up. Each call and
its answer is a line of JSON in ``$FUZZ_NOTES``, written before the next call.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import zlib
import zoneinfo
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import schemathesis
from hypothesis import strategies as st

QUEUES = ["a", "b", "default"]
EMPTYING = (("POST", "/v1/queues/{queue}/purge"), ("DELETE", "/v1/queues/{queue}"))
PURGED = "b"
KNOWN: dict[str, list[str]] = {
    "queue": QUEUES,
    "queues": QUEUES,
    "name": ["a", "b"],
    "task": ["math.sqrt"],
    "tasks": ["math.sqrt"],
    "job_id": [],
    "ids": [],
    "receipt": [],
    "receipts": [],
}
"""Existing names, by field or parameter."""

OF_TASKS = ("complete", "fail", "heartbeat", "stopped")
TASKS: list[str] = []
"""Receipts of tasks, for calls that take no other receipts."""

LATEST = 50
"""The number of ids and receipts that are remembered."""


def known(field: str, value: Any) -> Any:
    """A name, or in two of three cases an existing name in its place."""
    if isinstance(value, list):
        return [known(field, one) for one in value]
    names = KNOWN.get(field)
    if not names or not isinstance(value, str) or not value:
        return value
    number = zlib.crc32(value.encode("utf-8", "replace"))
    return names[number // 3 % len(names)] if number % 3 else value


CURSORS = [""]
"""Cursors of lists; no other text is a valid cursor."""

# -- texts that no pattern says -------------------------------------------------------------------

_PRINTABLE = st.characters(codec="utf-8").filter(str.isprintable)
_FIELD = st.sampled_from(["*", "*/7", "3", "1-5", "2,4", "1-5/2"])


def _is_name(text: str) -> bool:
    return not text.isspace() and len(text.encode()) <= 200


def _crons() -> st.SearchStrategy[str]:
    fields = st.lists(_FIELD, min_size=5, max_size=6).map(" ".join)
    return fields | st.sampled_from(["@daily", " @hourly", "0 6 L * MON-FRI", "30 2 * JAN,DEC 1#1"])


schemathesis.openapi.format("name", st.text(_PRINTABLE, min_size=1, max_size=200).filter(_is_name))
schemathesis.openapi.format("cron", _crons())
schemathesis.openapi.format("local-date-time", st.datetimes().map(dt.datetime.isoformat))
schemathesis.openapi.format("zone", st.sampled_from(sorted(zoneinfo.available_timezones())))

# -- rules that no schema says --------------------------------------------------------------------


def agreeing(case: Any) -> None:
    """Make the fields of a request consistent, as their descriptions require."""
    body = case.body if isinstance(case.body, dict) else {}
    parameters, query = case.path_parameters or {}, case.query or {}
    if (case.method, case.path) == ("PUT", "/v1/jobs/{job_id}") and body.get("id") is not None:
        body["id"] = unquote(parameters["job_id"])  # a body says nothing of a path
    act = case.path.rpartition("/")[2]
    if (
        "receipt" in parameters
        and act in OF_TASKS
        and unquote(parameters["receipt"]).count(".") == 1
    ):  # that of a message
        parameters["receipt"] = TASKS[zlib.crc32(parameters["receipt"].encode()) % len(TASKS)]
    if "cursor" in query:  # the text is the server's own
        query["cursor"] = CURSORS[zlib.crc32(query["cursor"].encode()) % len(CURSORS)]
    if case.path.endswith("}/messages"):  # a parameter says nothing of another
        options_agree(query)
    for job in _jobs(body):
        if job.get("task") is not None and case.path.startswith("/v1/jobs"):
            options_agree(job)  # the task could bring a key and a policy, and this one does not
            job["queue"] = job.get("queue") or "a"  # no worker has declared the task
    if case.path == "/v1/schedules/{name}" and body:
        rule_agrees(body)
        body["queue"] = body.get("queue") or "a"


def options_agree(options: dict[str, Any]) -> None:
    """Leave out options of a put that need or exclude another option."""
    if options.get("delay") is not None:
        options.pop("at", None)
    if options.get("key") is None:
        for name in ("on_conflict", "hold", "max_wait"):
            options.pop(name, None)
    if options.get("on_conflict") in ("replace", "merge"):
        options.pop("hold", None)
    if options.get("on_conflict") != "replace":
        options.pop("max_wait", None)


def rule_agrees(schedule: dict[str, Any]) -> None:
    """Apply rules that no schema has: an end after its start, a jitter within its interval.

    A time in the past is refused with 409; two of three such times become times in the future.
    """
    if schedule.get("start") is not None:
        schedule.pop("end", None)
    if schedule.get("every") is not None:
        schedule.pop("jitter", None)
    for field in ("at", "end"):
        moment = schedule.get(field)
        if zlib.crc32(repr(moment).encode()) % 3 == 0:
            continue
        if isinstance(moment, str):
            schedule[field] = f"2996{moment[4:]}"
        elif moment is not None:
            schedule[field] = max(moment, 2.0**35)


def learn(answer: Any) -> None:
    """Remember the ids and receipts of an answer."""
    if isinstance(answer, dict) and answer.get("cursor"):
        CURSORS.append(answer["cursor"])
    for job in _jobs(answer):
        if "receipt" in job and "task" in job:
            TASKS[:] = [*TASKS, job["receipt"]][-LATEST:]
        for field, many in (("id", ("job_id", "ids")), ("receipt", ("receipt", "receipts"))):
            if isinstance(job.get(field), str):
                for name in many:
                    KNOWN[name] = [*KNOWN[name], job[field]][-LATEST:]


def _jobs(answer: Any) -> Iterator[dict[str, Any]]:
    if isinstance(answer, dict):
        jobs = answer.get("jobs")
        yield from [job for job in jobs if isinstance(job, dict)] if jobs else [answer]


with open(os.environ["FUZZ_NOTES"]) as begun:  # what is there before the run
    for line in begun:
        learn(json.loads(line)["answer"])


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Insert existing names into a request that fits the description."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    parameters = case.path_parameters or {}
    for field in list(parameters):
        parameters[field] = quote(known(field, unquote(parameters[field])), safe="")
    if (case.method, case.path) in EMPTYING:  # what the run takes away it cannot miss
        parameters["queue"] = PURGED
    bodies = case.body if isinstance(case.body, dict) else {}
    if case.path.startswith("/v1/matching/"):
        bodies["queue"] = PURGED
    for body in (bodies, *_jobs(bodies)):
        for field in KNOWN.keys() & body.keys():
            body[field] = known(field, body[field])
    agreeing(case)


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Log a call and its answer."""
    try:
        answer = json.loads(response.content) if response.content else None
    except ValueError:
        answer = None
    note = {
        "method": case.method,
        "path": case.path,
        "names": {k: unquote(str(v)) for k, v in (case.path_parameters or {}).items()},
        "body": _plain(case.body),
        "status": response.status_code,
        "answer": answer,
    }
    with open(os.environ["FUZZ_NOTES"], "a") as notes:
        notes.write(json.dumps(note) + "\n")
    if response.status_code in (200, 201):
        learn(answer)


def _plain(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return None  # what is no JSON is no body that puts anything
    return value
