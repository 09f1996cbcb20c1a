"""What schemathesis does besides, in a run of :mod:`.fuzz`: it goes deep, and writes down.

Names that it thinks up are names of nothing. So some of them become those of what is there, before
a call is made, by what they are and by what was answered so far: a run with the same seed against a
new server makes the same calls, but for what the server thinks up itself. Each call and its answer
is a line of JSON in ``$FUZZ_NOTES``, written before the next call is made.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

import schemathesis

QUEUES = ["a", "b", "default"]
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
"""By field or parameter, what is there of it."""

LATEST = 50
"""As many ids and receipts are known."""


def known(field: str, value: Any) -> Any:
    """A name, or one in its place: of those thought up two in three."""
    if isinstance(value, list):
        return [known(field, one) for one in value]
    names = KNOWN.get(field)
    if not names or not isinstance(value, str) or not value:
        return value
    number = zlib.crc32(value.encode("utf-8", "replace"))
    return names[number // 3 % len(names)] if number % 3 else value


PUTS = ("/v1/jobs", "/v1/jobs/batch", "/v1/jobs/{job_id}")
RARE = ("at", "limit", "on_conflict", "unique_for", "max_wait", "encoding", "expires")
"""What is refused most often, by itself or beside other fields."""


def possible(job: dict[str, Any]) -> None:
    """Make of a job one that can be put: of those thought up two in three."""
    number = zlib.crc32(json.dumps(job, sort_keys=True).encode())
    if number % 3 == 0:
        return
    unwanted = ("body",) if number % 5 == 0 else ("task", "args", "kwargs")
    for field in list(job):
        number = zlib.crc32(field.encode(), number)
        if job[field] is None or field in (*RARE, *unwanted) or number % 3 == 0:
            del job[field]
    if "task" not in job:
        job.setdefault("body", number)


def regular(schedule: dict[str, Any]) -> None:
    """Make of a schedule one that has exactly one rule: of those thought up two in three."""
    if zlib.crc32(json.dumps(schedule, sort_keys=True).encode()) % 3:
        for field in ("cron", "at", "start", "end", "zone"):
            schedule.pop(field, None)
        schedule["every"] = 3600


def learn(answer: Any) -> None:
    """Note the ids and receipts of an answer."""
    for job in _jobs(answer):
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
    """Put names of what is there into what fits the description."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    parameters = case.path_parameters or {}
    for field in list(parameters):
        parameters[field] = known(field, parameters[field])
    if case.path.endswith("/purge"):  # what the run takes away it cannot miss
        parameters["queue"] = PURGED
    bodies = case.body if isinstance(case.body, dict) else {}
    for body in (bodies, *_jobs(bodies)):
        if case.path in PUTS and "jobs" not in body:
            possible(body)
        if case.method == "PUT" and case.path == "/v1/schedules/{name}":
            regular(body)
        for field in KNOWN.keys() & body.keys():
            body[field] = known(field, body[field])


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Write it down."""
    try:
        answer = json.loads(response.content) if response.content else None
    except ValueError:
        answer = None
    note = {
        "method": case.method,
        "path": case.path,
        "names": _plain(dict(case.path_parameters or {})),
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
