"""Jobs: put one or many, inspect them; change one, many, or all that match."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.client import compositions
from tidemill.client.explain import (
    explain_in,
    trail_of,
    why_not_altered,
    why_not_run,
    with_interrupted_runs,
)
from tidemill.client.job_handle import Job
from tidemill.client.options import Key
from tidemill.client.search import find_shown
from tidemill.core.config import check_alter, check_name
from tidemill.core.envelope import Envelope
from tidemill.core.job import HIDDEN, Put, Record, State
from tidemill.errors import CodecError, DuplicateJob, InvalidOption, ResultTimeout
from tidemill.server.http.answer_size import AT_ONCE, find_some, find_with_bodies
from tidemill.server.http.backend import Backend
from tidemill.server.http.bodies import as_json, body_out, bytes_of
from tidemill.server.http.endpoints import Call, Endpoint
from tidemill.server.http.problems import Problem
from tidemill.server.http.queue_permissions import allowed_queues, check_put, check_queues
from tidemill.server.http.schemas import jobs as schemas

_OPTIONS = frozenset(schemas.JobOptions.__struct_fields__)
_OF_KEYS = ("on_conflict", "hold", "max_wait")
_NOT_SAID = {"created": 0.0, "signature": b"", "text": ""}


# -- putting --------------------------------------------------------------------------------------


async def put_job(call: Call, body: schemas.JobIn) -> schemas.Placed:
    """Put a message, or a call of a task.

    A call has the options that the worker of the task has declared. A task that no worker has
    declared needs a ``queue``.
    """
    (put,) = await call.backend.put([await _envelope_in(call, body)])
    return placed(call, put)


async def _envelope_in(call: Call, body: schemas.JobIn) -> Envelope:
    await call.backend.read_declarations([body.task])
    envelope = await call.compute(lambda: _envelope_of(call.backend, body), 0)
    check_put(call.exchange, [envelope], [body])
    return envelope


async def put_jobs(call: Call, body: schemas.BatchIn) -> schemas.PlacedMany:
    """Put many jobs in one commit, all or none, in this order."""

    def make() -> list[Envelope]:
        return [_envelope_of(call.backend, job, n) for n, job in enumerate(body.jobs)]

    await call.backend.read_declarations(job.task for job in body.jobs)
    envelopes = await call.compute(make, 0)
    check_put(call.exchange, envelopes, body.jobs)
    body.jobs.clear()  # frees memory: decoded jobs are many times larger than their JSON
    puts = await call.backend.put(envelopes) if envelopes else []
    return schemas.PlacedMany(puts)  # type: ignore[arg-type]  # puts encode as Placed does


async def put_job_by_id(call: Call, job_id: str, body: schemas.JobIn) -> schemas.Placed:
    """Put a job under an id of your choice.

    Putting the same job again does nothing, so a request whose answer was lost can be repeated.
    This holds for 10 minutes after the put even if the job is no longer kept, until a client
    deletes the job or the server restarts. Another job under the same id is refused while the
    first job is kept.
    """
    if body.id not in (None, job_id):
        raise InvalidOption("id: differs from the id in the path; leave it out of the body")
    body.id = job_id
    envelope = await _envelope_in(call, body)
    puts, digest = call.backend.puts_by_id, _digest(envelope)
    same = schemas.Placed(job_id, "created")
    if puts.has(job_id, digest):
        call.status = 200
        return same
    try:
        (put,) = await call.backend.put([envelope])
    except DuplicateJob as error:
        if error.job_id not in ("", job_id):  # another job has the key
            raise
        record = await call.backend.run(call.backend.mill.broker.get, job_id)
        if record is None or _digest(record.envelope) != digest:
            raise
        call.status = 200
        puts.add(job_id, digest)
        return same
    if put.id == job_id:  # no other job with the key was kept instead
        puts.add(job_id, digest)
    return placed(call, put)


def placed(call: Call, put: Put | Job[Any]) -> schemas.Placed:
    if put.placed != "created":
        call.status = 200
    return schemas.Placed(put.id, str(put.placed))  # type: ignore[arg-type]  # one of the literals


def _digest(envelope: Envelope) -> bytes:
    """A digest that two jobs share if they are the same, apart from what the server sets."""
    said = msgspec.structs.replace(envelope, **_NOT_SAID)
    data = msgspec.msgpack.encode(said, order="deterministic")
    return hashlib.blake2b(data, digest_size=16).digest()


def _envelope_of(backend: Backend, job: schemas.JobIn, number: int = -1) -> Envelope:
    """The job of a request; ``number`` is its index in a batch."""
    try:
        return _message(backend, job) if job.task is None else _call(backend.mill, job)
    except InvalidOption as error:
        if number >= 0:
            raise type(error)(f"jobs[{number}]: {error}") from None
        raise


def _message(backend: Backend, job: schemas.JobIn) -> Envelope:
    if job.body is UNSET:
        raise InvalidOption("body or task is required: body for a message, task for a call")
    if job.args or job.kwargs:
        raise InvalidOption("args and kwargs belong to a task; a message has a body")
    if job.timeout is not None or job.result_ttl is not None:
        raise InvalidOption("timeout and result_ttl belong to a task; a message has a ttr")
    body = job.body if job.encoding == "json" else bytes_of("body", job.body)
    envelope = backend.queue(job.queue or "default").envelope(body, **options_of(job))
    if job.queue is None:
        raise InvalidOption("queue: a message needs the name of a queue")
    return envelope


def _call(mill: Tidemill, job: schemas.JobIn) -> Envelope:
    if job.body is not UNSET:
        raise InvalidOption("give only one of body, for a message, and task, for a call")
    options = options_of(job)
    if job.queue is not None:
        options["queue"] = job.queue
    try:
        return mill.runtime.envelope(
            mill.call(job.task or "", *job.args, **job.kwargs).using(**options)
        )
    except TypeError as error:
        raise InvalidOption(str(error)) from None


def options_of(job: schemas.PublishOptions) -> dict[str, Any]:
    names, pick, nothing = _options_in(type(job))
    values = pick(msgspec.structs.astuple(job))
    if values == nothing:  # most requests have no options
        return {}
    options = {name: v for name, v in zip(names, values, strict=True) if v is not None}
    if "retries" in options:
        options["retries"] = int(options["retries"])
    rules = {name: options.pop(name) for name in _OF_KEYS if name in options}
    if "key" in options:
        options["key"] = Key(options["key"], **rules)
    elif any(rules.values()):
        raise InvalidOption("on_conflict, hold and max_wait are rules of a key; give key with them")
    return options


@functools.cache
def _options_in(kind: type[schemas.PublishOptions]) -> tuple[list[str], Any, tuple[None, ...]]:
    """The names of a schema's options, a function that picks their values, and as many Nones."""
    places = [(n, name) for n, name in enumerate(kind.__struct_fields__) if name in _OPTIONS]
    pick = operator.itemgetter(*(n for n, _ in places))
    return [name for _, name in places], pick, (None,) * len(places)


# -- looking --------------------------------------------------------------------------------------


async def list_jobs(call: Call, query: schemas.JobQuery) -> schemas.Jobs:
    """List matching jobs, newest first.

    A list of jobs with large headers or errors may end before ``limit``. Continue the list with its
    cursor. A list has no logs and no results: read single jobs for these.
    """
    what, mill = filter_of(call, query), call.backend.mill
    mill.runtime.features.need(Feature.FAILED, "a list of jobs")
    limit = int(query.limit)
    find = functools.partial(find_with_bodies if query.bodies else find_shown, mill.broker)
    if query.bodies:
        mill.runtime.features.need(Feature.INSPECT, "a list of jobs with bodies")
        limit = min(limit, _WITH_BODIES)
    page = await call.backend.run(find_some, find, what, limit, query.cursor)
    listed = functools.partial(_listed, call, bodies=query.bodies)
    rows = await call.backend.run(lambda: [listed(record) for record in page.records])
    return schemas.Jobs(rows, page.cursor or None)


_WITH_BODIES = 16  # the most jobs in a list with bodies


def _listed(call: Call, record: Record, *, bodies: bool) -> schemas.JobListed:
    values = call.shown(record).public()
    if bodies:
        values["body"], values["encoding"] = _shown(call, record)
    return schemas.JobListed(**values)


def filter_of(call: Call, query: schemas.JobQuery | schemas.Matching) -> Filter:
    """The filter of a query. It has the token's only queue if the query names no queue."""
    queue, known = query.queue, allowed_queues(call.exchange)
    if not queue and len(known) == 1:
        queue = known[0]
    elif not queue and known:
        raise Problem("forbidden", f"name one of the token's queues: queue={known[0]}, for example")
    check_queues(call.exchange, [queue])
    if (query.key or query.search) and not call.sees_arguments:
        raise Problem("forbidden", "this role does not see arguments, so it cannot search for them")
    return Filter(
        states=frozenset(map(State, query.state)),
        queue=queue,
        task=query.task,
        key=query.key,
        tag=query.tag,
        text=query.search,
        id_prefix=f"{query.group}." if query.group else "",
    )


async def get_job(call: Call, job_id: str) -> schemas.JobTrail:
    """Get a job with all its events in order, and an explanation of its state."""
    return await call.backend.run(_trail, call, job_id)


def _trail(call: Call, job_id: str) -> schemas.JobTrail:
    mill = call.backend.mill
    record = mill.job(job_id).refresh()
    body, encoding = _shown(call, record)
    told = call.shown(with_interrupted_runs(record))  # their lines lie in the log, which hides
    record = call.shown(record)
    trail = [
        {
            "time": e.time or None,
            "what": e.what,
            "detail": e.detail,
            "traceback": e.traceback or None,
        }
        for e in trail_of(told)
    ]
    explanation = explain_in(mill.broker, record)
    return schemas.JobTrail(
        **record.public(),
        trail=trail,  # type: ignore[arg-type]  # encodes as the structs would
        explanation=explanation,
        body=body,
        encoding=encoding,  # type: ignore[arg-type]  # one of the three
    )


def _shown(call: Call, record: Record) -> tuple[Any, str]:
    """The body of a job and its encoding, or the reason why it cannot be read."""
    if not call.sees_arguments:
        return None, HIDDEN
    try:
        return body_out(call.backend.mill, record.envelope)
    except CodecError as error:
        return f"({error})", "repr"


async def get_result(call: Call, job_id: str, query: schemas.WaitQuery) -> schemas.ResultOut:
    """Wait for the end of a job, and get its result. Status 202: the job has not ended yet."""
    backend = call.backend
    job = backend.mill.job(job_id)
    wait = min(query.wait, backend.settings.longest_poll)
    with contextlib.suppress(ResultTimeout):
        try:
            await backend.run(job.wait, 0)
        except ResultTimeout:
            if not wait:
                raise
            await call.exchange.body()  # after this the server notices when the client leaves
            await backend.poll(call.exchange, backend.await_end(job, wait), None)
    out = await backend.run(_result, job, call.sees_arguments)
    if out.finished is None:
        call.status = 202
    return out


def _result(job: Job[Any], sees: bool) -> schemas.ResultOut:
    record, value, encoding = job.record, None, "json" if sees else HIDDEN
    if record.state is State.SUCCEEDED and sees:
        try:
            value, encoding = as_json(job.result(0))
        except CodecError as error:
            value, encoding = f"({error})", "repr"
    last = record.attempts[-1] if record.attempts else None
    failed = record.state is State.FAILED and last is not None
    return schemas.ResultOut(
        id=job.id,
        state=record.state.value,
        finished=record.finished or None,
        result=value,
        encoding=encoding,  # type: ignore[arg-type]  # one of the three
        error=record.error or None,
        traceback=(last.traceback or None) if failed and last is not None else None,
    )


# -- changing one job, many jobs, or all jobs that match -------------------------------------------

Change = Callable[[Call, list[str], Any], list[bool]]
"""Changes jobs as a body or a query says; the ids of chains and groups stand for their jobs."""


def _cancel(call: Call, ids: list[str], how: schemas.CancelIn | schemas.CancelMany) -> list[bool]:
    mill = call.backend.mill
    mill.runtime.features.need(Feature.CANCEL, "cancel")
    return compositions.cancel_jobs(mill.runtime, ids, terminate=how.terminate, may=_may(call))


def _retry(
    call: Call, ids: list[str], how: schemas.RetryQuery | schemas.RetryMany | schemas.RetryMatching
) -> list[bool]:
    return retry(call, ids, force=how.force)


def retry(call: Call, ids: Sequence[str], *, force: bool = False) -> list[bool]:
    """Retry jobs, and wholes that lie in the queues of the token."""
    return compositions.retry_jobs(call.backend.mill.runtime, ids, force=force, may=_may(call))


def _alter(call: Call, ids: list[str], how: schemas.AlterIn | schemas.AlterMany) -> list[bool]:
    mill, to = call.backend.mill, _target(call, how)
    return compositions.alter_jobs(mill.runtime, ids, **to, may=_may(call, hooks=True))


def _target(
    call: Call, how: schemas.AlterIn | schemas.AlterMany | schemas.AlterMatching
) -> dict[str, Any]:
    rank, queue = check_alter(how.to_priority, how.to_queue)
    check_queues(call.exchange, [queue] if queue else ())
    call.backend.mill.runtime.features.need(Feature.ALTER, "alter")
    return {"rank": rank, "queue": queue}


def _delete(call: Call, ids: list[str], how: object = None) -> list[bool]:
    return compositions.delete_jobs(call.backend.mill.runtime, ids, may=_may(call, hooks=True))


def _may(call: Call, *, hooks: bool = False) -> Callable[[str], bool]:
    """Whether the token's queues hold all jobs of a whole; with ``hooks`` its hooks, too."""
    mill, queues = call.backend.mill, allowed_queues(call.exchange)
    return lambda whole: (
        not queues or compositions.lies_in(mill.runtime, whole, queues, hooks=hooks)
    )


async def _one(
    call: Call, job_id: str, change: Change, how: Any, why_not: Callable[[Record], str]
) -> None:
    def attempt() -> None:
        if not change(call, [job_id], how)[0]:
            record = call.backend.mill.job(job_id).refresh()  # raises if the job does not exist
            raise Problem("conflict", f"{job_id}: {why_not(call.shown(record))}", job_id=job_id)

    await call.backend.run(attempt)


async def _many(call: Call, change: Change, how: schemas.Ids) -> schemas.Done:
    ids = [check_name("id", job_id) for job_id in how.ids]
    return schemas.Done(await call.backend.run(change, call, ids, how))


async def _matching(
    call: Call, body: schemas.Matching, act: Callable[[list[str]], list[bool]]
) -> schemas.Acted:
    what = filter_of(call, body)
    return await call.backend.run(change_matching, call, what, int(body.limit), act)


def change_matching(
    call: Call, what: Filter, most: int, act: Callable[[list[str]], list[bool]]
) -> schemas.Acted:
    """Change up to ``most`` jobs that match, the newest first."""
    mill = call.backend.mill
    mill.runtime.features.need(Feature.FAILED, "jobs that match")
    ids: list[str] = []
    cursor = ""
    while len(ids) < most:
        page = mill.jobs(what).page(limit=min(most - len(ids), AT_ONCE), cursor=cursor)
        ids += [record.envelope.id for record in page.records]
        cursor = page.cursor
        if not cursor:
            break
    return schemas.Acted(ids, act(ids) if ids else [], bool(cursor))


async def cancel_job(call: Call, job_id: str, body: schemas.CancelIn) -> None:
    """Cancel a job: at once, or through its worker while it runs.

    The id of a chain or group stands for its jobs.
    """
    await _one(call, job_id, _cancel, body, lambda _: "it has ended already")


async def cancel_jobs(call: Call, body: schemas.CancelMany) -> schemas.Done:
    """Cancel many jobs."""
    return await _many(call, _cancel, body)


async def cancel_matching(call: Call, body: schemas.CancelMatching) -> schemas.Acted:
    """Cancel matching jobs, the newest first."""
    mill = call.backend.mill
    mill.runtime.features.need(Feature.CANCEL, "cancel")
    cancel = functools.partial(mill.broker.cancel, terminate=body.terminate)
    return await _matching(call, body, cancel)


async def retry_job(call: Call, job_id: str, query: schemas.RetryQuery) -> None:
    """Start a new run of a failed, cancelled or expired job, or make a scheduled job ready.

    The id of a chain or group stands for its jobs that failed. The jobs that were cancelled because
    of them follow.
    """
    mill = call.backend.mill
    await _one(call, job_id, _retry, query, lambda record: why_not_run(mill.runtime, record))


async def retry_jobs(call: Call, body: schemas.RetryMany) -> schemas.Done:
    """Make many jobs ready again."""
    return await _many(call, _retry, body)


async def retry_matching(call: Call, body: schemas.RetryMatching) -> schemas.Acted:
    """Make matching jobs ready again, the newest first."""
    return await _matching(call, body, lambda ids: _retry(call, ids, body))


async def alter_job(call: Call, job_id: str, body: schemas.AlterIn) -> None:
    """Give a job that waits another priority, or move it to another queue.

    The id of a chain or group stands for its jobs.
    """
    _, queue = check_alter(body.to_priority, body.to_queue)
    await _one(call, job_id, _alter, body, lambda record: why_not_altered(record, queue))


async def alter_jobs(call: Call, body: schemas.AlterMany) -> schemas.Done:
    """Give many jobs that wait another priority, or move them to another queue."""
    return await _many(call, _alter, body)


async def alter_matching(call: Call, body: schemas.AlterMatching) -> schemas.Acted:
    """Give matching jobs that wait another priority, or move them to another queue."""
    alter = functools.partial(call.backend.mill.broker.alter, **_target(call, body))
    return await _matching(call, body, alter)


async def delete_job(call: Call, job_id: str) -> None:
    """Delete a job in any state. A running job loses its lease.

    The id of a chain or group stands for its jobs and hooks.
    """
    await _one(call, job_id, _delete, None, lambda _: "it cannot be deleted")
    call.backend.puts_by_id.forget([job_id])


async def delete_jobs(call: Call, body: schemas.Ids) -> schemas.Done:
    """Delete many jobs."""
    done = await _many(call, _delete, body)
    call.backend.puts_by_id.forget(body.ids)
    return done


async def delete_matching(call: Call, body: schemas.Matching) -> schemas.Acted:
    """Delete matching jobs, the newest first."""
    acted = await _matching(call, body, call.backend.mill.broker.delete)
    call.backend.puts_by_id.forget(acted.ids)
    return acted


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/jobs", put_job, status=201, also=(200, 404, 409, 507), checks_queues=True
    ),
    Endpoint(
        "POST", "/v1/jobs/batch", put_jobs, status=201, also=(404, 409, 507), checks_queues=True
    ),
    Endpoint("PUT", "/v1/jobs/{job_id}", put_job_by_id, status=201, also=(200, 409, 507)),
    Endpoint("GET", "/v1/jobs", list_jobs, checks_queues=True),
    Endpoint("GET", "/v1/jobs/{job_id}", get_job, also=(410,)),
    Endpoint("GET", "/v1/jobs/{job_id}/result", get_result, also=(202, 410)),
    Endpoint("POST", "/v1/jobs/{job_id}/cancel", cancel_job, also=(409, 410)),
    Endpoint("POST", "/v1/jobs/{job_id}/retry", retry_job, also=(409, 410)),
    Endpoint("POST", "/v1/jobs/{job_id}/alter", alter_job, also=(409, 410)),
    Endpoint("DELETE", "/v1/jobs/{job_id}", delete_job, also=(409, 410)),
    Endpoint("POST", "/v1/jobs/cancel", cancel_jobs),
    Endpoint("POST", "/v1/jobs/retry", retry_jobs),
    Endpoint("POST", "/v1/jobs/alter", alter_jobs),
    Endpoint("POST", "/v1/jobs/delete", delete_jobs),
    Endpoint(
        "POST", "/v1/matching/cancel", cancel_matching, checks_queues=True, audit="cancelled jobs"
    ),
    Endpoint(
        "POST", "/v1/matching/retry", retry_matching, checks_queues=True, audit="retried jobs"
    ),
    Endpoint(
        "POST", "/v1/matching/alter", alter_matching, checks_queues=True, audit="altered jobs"
    ),
    Endpoint(
        "POST", "/v1/matching/delete", delete_matching, checks_queues=True, audit="deleted jobs"
    ),
)
