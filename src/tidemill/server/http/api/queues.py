"""Queues and limits: statistics, pause and resume, purge, retry, and settings."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import UNSET

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.core.config import check_name
from tidemill.core.job import State
from tidemill.limits.declare import Breaker, limit_public
from tidemill.server.http.api.jobs import change_matching, retry
from tidemill.server.http.endpoints import Call, Endpoint
from tidemill.server.http.problems import Problem
from tidemill.server.http.schemas import queues as schemas
from tidemill.server.tokens import Role


def queue_out(stats: QueueStats) -> schemas.QueueOut:
    return schemas.QueueOut(**stats.public())


async def list_queues(call: Call) -> schemas.Queues:
    """List all queues with their statistics."""
    rows = await call.backend.run(call.backend.mill.queues)
    return schemas.Queues([queue_out(row) for row in rows])


async def get_queue(call: Call, queue: str) -> schemas.QueueOut:
    """Get the statistics of a queue."""
    return queue_out(await call.backend.run(_row, call.backend.mill, queue))


def _row(mill: Tidemill, name: str) -> QueueStats:
    check_name("queue", name)
    for row in mill.queues():
        if row.name == name:
            return row
    raise Problem("not-found", f"there is no queue {name!r}")


async def change_queue(call: Call, queue: str, body: schemas.QueueIn) -> schemas.QueueOut:
    """Change a queue: pause or resume it, and set the most unfinished jobs that it may hold."""
    max_size = None if body.max_size is None else int(body.max_size)
    return await _change(call, queue, body.paused, max_size)


async def pause_queue(call: Call, queue: str) -> schemas.QueueOut:
    """Pause a queue: it starts no more jobs. Running jobs continue; new jobs are accepted."""
    return await _change(call, queue, True)


async def resume_queue(call: Call, queue: str) -> schemas.QueueOut:
    """Resume a paused queue."""
    return await _change(call, queue, False)


async def _change(
    call: Call, queue: str, paused: bool | None, max_size: int | None = None
) -> schemas.QueueOut:
    mill = call.backend.mill
    check_name("queue", queue)
    if paused is not None:
        mill.runtime.features.need(Feature.PAUSE, "pausing a queue")
    if max_size is not None:
        mill.runtime.features.need(Feature.MAX_SIZE, "max_size")

    def change() -> QueueStats:
        mill.broker.set_queue(queue, paused=paused, max_size=max_size)
        return _row(mill, queue)

    return queue_out(await call.backend.run(change))


async def purge_queue(call: Call, queue: str, query: schemas.PurgeQuery) -> schemas.Number:
    """Delete all jobs of a queue that are neither running nor finished.

    Unless ``now`` is given, the jobs are kept for a while and can be restored.
    """
    purged = await call.backend.run(lambda: call.backend.mill.queue(queue).purge(now=query.now))
    call.backend.puts_by_id.forget()
    return schemas.Number(purged)


async def list_purges(call: Call, queue: str) -> schemas.PurgesOut:
    """List the purges of a queue that can be restored, the latest first."""
    found = await call.backend.run(call.backend.mill.queue(queue).purges)
    return schemas.PurgesOut(msgspec.convert(found, list[schemas.PurgeOut], from_attributes=True))


async def restore_queue(call: Call, queue: str, body: schemas.RestoreIn) -> schemas.RestoredOut:
    """Restore the jobs of a purge, with their order and due times. Their attempts begin anew.

    A job stays purged when another job has its key by now, or when the job has expired or belongs
    to a flow.
    """
    mill = call.backend.mill
    mill.runtime.features.need(Feature.INSPECT, "restoring a purge")

    def restore() -> schemas.RestoredOut:
        known = [one.id for one in mill.queue(queue).purges()]
        if not known or body.purge not in ["", *known]:
            raise Problem("not-found", f"queue {queue!r} has no such purge to restore")
        restored = mill.queue(queue).restore(body.purge)
        return schemas.RestoredOut(restored.jobs, restored.left)

    return await call.backend.run(restore)


async def delete_queue(call: Call, queue: str, query: schemas.DeleteQuery) -> schemas.Number:
    """Delete a queue with its counters and settings; get the number of deleted jobs.

    A queue with running jobs is refused. Without ``force``, a queue with any jobs is refused, even
    if all its jobs have finished.
    """
    mill = call.backend.mill

    def delete() -> int:
        _row(mill, queue)
        return mill.queue(queue).delete(force=query.force)

    deleted = await call.backend.run(delete)
    call.backend.puts_by_id.forget()
    return schemas.Number(deleted)


async def retry_queue(call: Call, queue: str, body: schemas.RetryIn) -> schemas.Number:
    """Make failed jobs of a queue ready again, newest first."""
    what = Filter(states=frozenset({State.FAILED}), queue=check_name("queue", queue))
    again = functools.partial(retry, call)
    acted = await call.backend.run(change_matching, call, what, int(body.count), again)
    return schemas.Number(sum(acted.done))


# -- limits ---------------------------------------------------------------------------------------


async def list_limits(call: Call) -> schemas.LimitsOut:
    """List all limits, the limits of queues first."""
    return schemas.LimitsOut(await call.backend.run(_limits, call.backend.mill))


def _limits(mill: Tidemill) -> list[schemas.LimitOut]:
    return [msgspec.convert(limit_public(row), schemas.LimitOut) for row in mill.limits.list()]


async def change_limit(call: Call, name: str, body: schemas.LimitIn) -> schemas.LimitOut:
    """Change a limit by its name. The change applies at once, to all workers.

    The limit of a task has the name of the task, unless the code gives another name.
    """
    return await _set_limit(call, name, False, body)


async def change_queue_limit(
    call: Call, queue: str, body: schemas.QueueLimitIn
) -> schemas.LimitOut:
    """Change the limit of a queue. The change applies at once, to all workers."""
    return await _set_limit(call, queue, True, body)


async def reset_limit(call: Call, name: str) -> schemas.LimitOut:
    """Reset a limit to the settings that code declares."""
    return await _set_limit(call, name, False)


async def reset_queue_limit(call: Call, queue: str) -> schemas.LimitOut:
    """Reset the limit of a queue to the settings that code declares."""
    return await _set_limit(call, queue, True)


async def _set_limit(
    call: Call, name: str, of_queue: bool, body: schemas.LimitIn | None = None
) -> schemas.LimitOut:
    """Set a limit, or reset it without a body."""
    mill = call.backend.mill

    def find() -> schemas.LimitOut | None:
        rows = (row for row in _limits(mill) if (row.name, row.queue) == (name, of_queue))
        return next(rows, None)

    def make() -> schemas.LimitOut:
        row = find()
        if row is None and not of_queue:  # no job would use the limit
            raise _no_limit(name)
        if body is not None and _lacks_rate(body, row):
            raise Problem("conflict", f"burst: the limit {name!r} has no rate; give a rate, too")
        limits = mill.limits
        if body is None:
            (limits.reset_queue if of_queue else limits.reset)(name)
        else:
            (limits.set_queue if of_queue else limits.set)(name, **_settings_in(body))
        if (row := find()) is None:
            raise _no_limit(name)
        return row

    return await call.backend.run(make)


def _lacks_rate(body: schemas.LimitIn, row: schemas.LimitOut | None) -> bool:
    """Whether a burst is set for a limit that has no rate and gets none."""
    given = body.burst is not UNSET and body.burst is not None
    return given and body.rate is UNSET and (row is None or row.rate is None)


def _no_limit(name: str) -> Problem:
    return Problem(
        "not-found",
        f"there is no limit {name!r}; a limit exists once the first job with it has been put",
    )


def _settings_in(body: schemas.LimitIn) -> dict[str, Any]:
    """The settings in the body. None removes a setting."""
    fields = (field.name for field in msgspec.structs.fields(body))
    given = {name: value for name in fields if (value := getattr(body, name)) is not UNSET}
    if given.get("concurrency") is not None:
        given["concurrency"] = int(given["concurrency"])
    breaker = given.get("breaker")
    if isinstance(breaker, schemas.BreakerIn):
        given["breaker"] = Breaker(int(breaker.failures), breaker.pause)
    return given


ADMIN = Role.ADMIN
ENDPOINTS = (
    Endpoint("GET", "/v1/queues", list_queues),
    Endpoint("GET", "/v1/queues/{queue}", get_queue),
    Endpoint("PATCH", "/v1/queues/{queue}", change_queue, ADMIN, audit="changed queue"),
    Endpoint("POST", "/v1/queues/{queue}/pause", pause_queue, audit="paused queue"),
    Endpoint("POST", "/v1/queues/{queue}/resume", resume_queue, audit="resumed queue"),
    Endpoint("POST", "/v1/queues/{queue}/retry", retry_queue, audit="retried jobs of queue"),
    Endpoint("POST", "/v1/queues/{queue}/purge", purge_queue, ADMIN, audit="purged queue"),
    Endpoint("GET", "/v1/queues/{queue}/purges", list_purges),
    Endpoint("POST", "/v1/queues/{queue}/restore", restore_queue, ADMIN, audit="restored queue"),
    Endpoint(
        "DELETE", "/v1/queues/{queue}", delete_queue, ADMIN, also=(409,), audit="deleted queue"
    ),
    Endpoint(
        "PATCH",
        "/v1/queues/{queue}/limit",
        change_queue_limit,
        ADMIN,
        also=(409,),
        audit="changed queue limits",
    ),
    Endpoint(
        "DELETE", "/v1/queues/{queue}/limit", reset_queue_limit, ADMIN, audit="reset queue limits"
    ),
    Endpoint("GET", "/v1/limits", list_limits),
    Endpoint("PATCH", "/v1/limits/{name}", change_limit, ADMIN, also=(409,), audit="changed limit"),
    Endpoint("DELETE", "/v1/limits/{name}", reset_limit, ADMIN, audit="reset limit"),
)
