"""Jobs: put one or many, look at them, act on them."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET

from tidemill.app import Tidemill
from tidemill.brokers.base import Feature, Filter
from tidemill.config import check_name
from tidemill.errors import CodecError, DuplicateJob, InvalidOption, ResultTimeout
from tidemill.handle import Job
from tidemill.job import Envelope, Put, Record, State
from tidemill.server.backend import Backend
from tidemill.server.batches import decode_batch, decode_job
from tidemill.server.bodies import as_json, body_out, bytes_of
from tidemill.server.endpoints import Call, Endpoint
from tidemill.server.listing import find_some
from tidemill.server.problems import Problem
from tidemill.server.queue_tokens import check_put, check_queues, limits
from tidemill.server.shapes.jobs import (
    BatchIn,
    CancelIn,
    CancelMany,
    Done,
    Ids,
    JobIn,
    JobListed,
    JobOptions,
    JobOut,
    JobQuery,
    Jobs,
    JobTrail,
    KickMany,
    KickQuery,
    Matching,
    MessageOptions,
    Placed,
    PlacedMany,
    ResultOut,
    WaitQuery,
)
from tidemill.server.tokens import Role
from tidemill.trail import explain_in, trail_of, why_not_run

__all__ = ["ENDPOINTS", "envelope_of", "filter_of", "job_out", "options_of", "placed"]

_OPTIONS = frozenset(JobOptions.__struct_fields__)
_NOT_SAID = {"created": 0.0, "signature": b"", "text": ""}


# -- putting --------------------------------------------------------------------------------------


async def put_job(call: Call, body: JobIn) -> Placed:
    """Put a message, or a call of a task."""
    envelope = await call.beside(lambda: envelope_of(call.backend, body), 0)
    check_put(call.exchange, [envelope])
    (put,) = await call.backend.put([envelope])
    return placed(call, put)


async def put_jobs(call: Call, body: BatchIn) -> PlacedMany:
    """Put many jobs in one commit, all or none, in order."""

    def make() -> list[Envelope]:
        return [envelope_of(call.backend, job, n) for n, job in enumerate(body.jobs)]

    envelopes = await call.beside(make, 0)
    check_put(call.exchange, envelopes)
    body.jobs.clear()  # they take many times their bytes
    puts = await call.backend.put(envelopes) if envelopes else []
    return PlacedMany(puts)  # type: ignore[arg-type]  # they encode as Placed do


async def put_job_by_id(call: Call, job_id: str, body: JobIn) -> Placed:
    """Put a job under an id of your own; the same again does nothing, another is refused.

    So it may be sent again when an answer was lost. A message that was acknowledged is forgotten,
    and its id is free again.
    """
    if body.id not in (None, job_id):
        raise InvalidOption("id: the body has another than the path; leave it out")
    body.id = job_id
    envelope = await call.beside(lambda: envelope_of(call.backend, body), 0)
    check_put(call.exchange, [envelope])
    try:
        (put,) = await call.backend.put([envelope])
    except DuplicateJob as error:
        if error.job_id not in ("", job_id):  # it has the key, not the id
            raise
        record = await call.backend.run(call.backend.mill.broker.get, job_id)
        if record is None or not _is_same(record.envelope, envelope):
            raise
        call.status = 200
        return Placed(job_id, "created")
    return placed(call, put)


def placed(call: Call, put: Put) -> Placed:
    """The answer to a put."""
    if put.placed != "created":
        call.status = 200
    return Placed(put.id, put.placed.value)


def _is_same(old: Envelope, new: Envelope) -> bool:
    """Whether one put says what another said."""
    one = msgspec.structs.replace(old, **_NOT_SAID)
    return one == msgspec.structs.replace(new, **_NOT_SAID)


def envelope_of(backend: Backend, job: JobIn, number: int = -1) -> Envelope:
    """The job that a request describes; ``number``: as which of many, from 0.

    Raises:
        InvalidOption: it cannot be; the sentence says which of many it is.
    """
    try:
        return _message(backend, job) if job.task is None else _call(backend.mill, job)
    except InvalidOption as error:
        if number >= 0:
            raise type(error)(f"jobs[{number}]: {error}") from None
        raise


def _message(backend: Backend, job: JobIn) -> Envelope:
    if job.body is UNSET:
        raise InvalidOption("give body, for a message, or task, for a call")
    if job.args or job.kwargs:
        raise InvalidOption("args and kwargs go with task; a message has a body")
    if job.timeout is not None or job.result_ttl is not None:
        raise InvalidOption("timeout and result_ttl go with task; a message has a ttr")
    body = job.body if job.encoding == "json" else bytes_of("body", job.body)
    envelope = backend.queue(job.queue or "default").envelope(body, **options_of(job))
    if job.queue is None:
        raise InvalidOption("queue: a message needs the name of its queue")
    return envelope


def _call(mill: Tidemill, job: JobIn) -> Envelope:
    if job.body is not UNSET:
        raise InvalidOption("give either body, for a message, or task, for a call")
    options = options_of(job)
    if job.queue is not None:
        options["queue"] = job.queue
    try:
        return mill.envelope(mill.call(job.task or "", *job.args, **job.kwargs).using(**options))
    except TypeError as error:
        raise InvalidOption(f"{job.task} cannot be called so: {error}") from None


def options_of(job: MessageOptions) -> dict[str, Any]:
    """The options that a request gives."""
    names, pick, nothing = _options_in(type(job))
    values = pick(msgspec.structs.astuple(job))
    if values == nothing:  # as most have it
        return {}
    options = {name: v for name, v in zip(names, values, strict=True) if v is not None}
    if "retries" in options:
        options["retries"] = int(options["retries"])
    return options


@functools.cache
def _options_in(kind: type[MessageOptions]) -> tuple[list[str], Any, tuple[None, ...]]:
    """The names of a shape's options; what picks them of all its values; what says that none is."""
    places = [(n, name) for n, name in enumerate(kind.__struct_fields__) if name in _OPTIONS]
    pick = operator.itemgetter(*(n for n, _ in places))
    return [name for _, name in places], pick, (None,) * len(places)


# -- looking --------------------------------------------------------------------------------------


def job_out(record: Record) -> JobOut:
    """A job as lists show it."""
    return JobOut(**record.public())


async def list_jobs(call: Call, query: JobQuery) -> Jobs:
    """List jobs, newest first, those that match.

    A list of large jobs ends before ``limit``, and its cursor says where to go on.
    """
    what, mill = filter_of(call, query), call.backend.mill
    mill.features.need(Feature.FAILED, "a list of jobs")
    limit, find = int(query.limit), mill.broker.find
    if query.bodies:
        limit = min(limit, _WITH_BODIES)
    page = await call.backend.run(find_some, find, what, limit, query.cursor)
    if not query.bodies:
        return Jobs([JobListed(**it.public()) for it in page.records], page.cursor or None)
    rows = await call.backend.run(lambda: [_listed(mill, record) for record in page.records])
    return Jobs(rows, page.cursor or None)


_WITH_BODIES = 16
"""Jobs in a list with their bodies, at most."""


def _listed(mill: Tidemill, record: Record) -> JobListed:
    body, encoding = _shown(mill, record)
    # public() gives plain values by name, whose types mypy cannot tell apart.
    return JobListed(**record.public(), body=body, encoding=encoding)  # type: ignore[arg-type]


def filter_of(call: Call, query: JobQuery | Matching) -> Filter:
    """What matches a query. A token for one queue means that one where the query names none."""
    queue, known = query.queue, limits(call.exchange)
    if not queue and len(known) == 1:
        queue = known[0]
    check_queues(call.exchange, [queue])
    return Filter(
        states=frozenset(map(State, query.state)),
        queue=queue,
        task=query.task,
        key=query.key,
        tag=query.tag,
        text=query.search,
        id_prefix=f"{query.group}." if query.group else "",
    )


async def get_job(call: Call, job_id: str) -> JobTrail:
    """Look at a job: all that happened to it, in order, and why it is where it is."""
    return await call.backend.run(_trail, call.backend.mill, job_id)


def _trail(mill: Tidemill, job_id: str) -> JobTrail:
    record = mill.job(job_id).refresh()
    body, encoding = _shown(mill, record)
    trail = [
        {
            "time": e.time or None,
            "what": e.what,
            "detail": e.detail,
            "traceback": e.traceback or None,
        }
        for e in trail_of(record)
    ]
    explanation = explain_in(mill.broker, record)
    return JobTrail(
        **record.public(),
        trail=trail,  # type: ignore[arg-type]  # encodes as the structs would
        explanation=explanation,
        body=body,
        encoding=encoding,  # type: ignore[arg-type]  # one of the three
    )


def _shown(mill: Tidemill, record: Record) -> tuple[Any, str]:
    """The body of a job as answers show it, in which encoding; or why it cannot be read."""
    try:
        return body_out(mill, record.envelope)
    except CodecError as error:
        return f"({error})", "repr"


async def get_result(call: Call, job_id: str, query: WaitQuery) -> ResultOut:
    """How a job ended; waits for that. 202: it has not ended yet."""
    backend = call.backend
    job = backend.mill.job(job_id)
    wait = min(query.wait, backend.settings.longest_poll)
    with contextlib.suppress(ResultTimeout):
        try:
            await backend.run(job.wait, 0)
        except ResultTimeout:
            if not wait:
                raise
            await call.exchange.body()  # whatever it is: from then on it is seen when it goes
            await backend.polls.wait(call.exchange, backend.await_state(job, wait), None)
    out = await backend.run(_result, job)
    if out.finished is None:
        call.status = 202
    return out


def _result(job: Job[Any]) -> ResultOut:
    record, value, encoding = job.record, None, "json"
    if record.state is State.SUCCEEDED:
        try:
            value, encoding = as_json(job.result(0))
        except CodecError as error:
            value, encoding = f"({error})", "repr"
    last = record.attempts[-1] if record.attempts else None
    failed = record.state is State.FAILED and last is not None
    return ResultOut(
        id=job.id,
        state=record.state.value,
        finished=record.finished or None,
        result=value,
        encoding=encoding,  # type: ignore[arg-type]  # one of the three
        error=record.error or None,
        traceback=(last.traceback or None) if failed and last is not None else None,
    )


# -- acting ---------------------------------------------------------------------------------------


async def cancel_job(call: Call, job_id: str, body: CancelIn) -> None:
    """Cancel a job: at once, or through its worker when it runs."""
    await _act(call, job_id, lambda job: job.cancel(body.terminate), "it has ended already")


async def kick_job(call: Call, job_id: str, query: KickQuery) -> None:
    """Begin a new run of a failed, cancelled or expired job, or make a scheduled one ready."""
    await _act(call, job_id, lambda job: job.retry(query.force), why_not_run)


async def delete_job(call: Call, job_id: str) -> None:
    """Forget a job in any state; one that runs loses its lease."""
    await _act(call, job_id, Job.delete, "it cannot be deleted")


async def _act(
    call: Call, job_id: str, act: Any, why_not: str | Callable[[Record], str]
) -> None:
    def attempt() -> None:
        job = call.backend.mill.job(job_id)
        if not act(job):
            record = job.refresh()  # it may not be there
            why = why_not if isinstance(why_not, str) else why_not(record)
            raise Problem("conflict", f"{job_id}: {why}", job_id=job_id)

    await call.backend.run(attempt)


async def cancel_jobs(call: Call, body: CancelMany) -> Done:
    """Cancel many jobs."""
    broker, ids = call.backend.mill.broker, _checked(call.backend, body, Feature.CANCEL, "cancel")
    return Done(await call.backend.run(lambda: broker.cancel(ids, terminate=body.terminate)))


async def kick_jobs(call: Call, body: KickMany) -> Done:
    """Make many jobs ready again."""
    broker, ids = call.backend.mill.broker, _checked(call.backend, body, Feature.FAILED, "kick")
    return Done(await call.backend.run(lambda: broker.kick(ids, force=body.force)))


async def delete_jobs(call: Call, body: Ids) -> Done:
    """Forget many jobs."""
    ids = _checked(call.backend, body, Feature.FAILED, "delete")
    return Done(await call.backend.run(call.backend.mill.broker.delete, ids))


def _checked(backend: Backend, body: Ids, feature: Feature, what: str) -> list[str]:
    backend.mill.features.need(feature, what)
    return [check_name("id", job_id) for job_id in body.ids]


OPERATOR = Role.OPERATOR
ENDPOINTS = (
    Endpoint(
        *("POST", "/v1/jobs", put_job, OPERATOR),
        status=201,
        also=(200, 409, 507),
        makes=decode_job,
        limited=True,
    ),
    Endpoint(
        *("POST", "/v1/jobs/batch", put_jobs, OPERATOR),
        status=201,
        also=(409, 507),
        makes=decode_batch,
        limited=True,
    ),
    Endpoint(
        *("PUT", "/v1/jobs/{job_id}", put_job_by_id, OPERATOR),
        status=201,
        also=(200, 409, 507),
        makes=decode_job,
    ),
    Endpoint("GET", "/v1/jobs", list_jobs, limited=True),
    Endpoint("GET", "/v1/jobs/{job_id}", get_job, also=(410,)),
    Endpoint("GET", "/v1/jobs/{job_id}/result", get_result, also=(202, 410)),
    Endpoint("POST", "/v1/jobs/{job_id}/cancel", cancel_job, OPERATOR, status=204, also=(409, 410)),
    Endpoint("POST", "/v1/jobs/{job_id}/kick", kick_job, OPERATOR, status=204, also=(409, 410)),
    Endpoint("DELETE", "/v1/jobs/{job_id}", delete_job, OPERATOR, status=204, also=(409, 410)),
    Endpoint("POST", "/v1/jobs/cancel", cancel_jobs, OPERATOR),
    Endpoint("POST", "/v1/jobs/kick", kick_jobs, OPERATOR),
    Endpoint("POST", "/v1/jobs/delete", delete_jobs, OPERATOR),
)
