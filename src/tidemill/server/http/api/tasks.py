"""Tasks for workers in other languages: reserve calls by the names of tasks.

Calls are settled in :mod:`.reservations`.
"""

from __future__ import annotations

import functools

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.core.config import check_name
from tidemill.core.envelope import priority_of
from tidemill.core.signatures import hands_on
from tidemill.errors import CodecError
from tidemill.server.delivery import value_in
from tidemill.server.http.api.messages import hand_over
from tidemill.server.http.bodies import as_json
from tidemill.server.http.endpoints import Call, Endpoint
from tidemill.server.http.receipts import receipt_of
from tidemill.server.http.schemas.jobs import LimitOf
from tidemill.server.http.schemas.reservations import ReservedTask, ReservedTasks, ReserveTasksIn
from tidemill.server.shared_owner import SharedOwner
from tidemill.server.waiters import ReservedJob
from tidemill.workflows.parent_results import ParentResults


async def reserve_tasks(call: Call, body: ReserveTasksIn) -> ReservedTasks:
    """Reserve calls of tasks; wait up to ``timeout`` seconds for the first call.

    Each call is reserved until its ttr is over. Send heartbeats meanwhile, then complete or fail
    it. Calls of other tasks in these queues go back, and are tried again later.
    """
    call.backend.mill.runtime.features.need(Feature.RESULTS, "reserving tasks")
    for name in body.tasks:
        check_name("task", name)
    async with call.backend.task_owners.use(body.tasks) as shared_owner:
        encode = functools.partial(_encoded, call, shared_owner)
        # The answers are encoded calls, which encode as ReservedTask does.
        return ReservedTasks(await hand_over(call, shared_owner, body, encode))  # type: ignore[arg-type]


def _encoded(call: Call, shared_owner: SharedOwner, job: ReservedJob) -> msgspec.Raw:
    """A call as JSON.

    Raises:
        CodecError: the call is not signed as it should be, or its arguments do not fit into JSON.
        Fail: the result of a parent is missing.
        Snooze, Skip: a parent was retried before the call ran.
    """
    mill, envelope = call.backend.mill, job.envelope
    value = value_in(envelope, mill.runtime.keys)
    if envelope.links is not None:
        value = ParentResults(mill.runtime, job.lease, envelope).fill(value)
    args, kwargs = value
    lease, limit, planned = job.lease, envelope.limit, envelope.planned
    then = hands_on(envelope)
    receipt = receipt_of(shared_owner.owner.id, lease.token, envelope.id, hands_on=then)
    out = ReservedTask(
        receipt=call.sealed(receipt),
        id=envelope.id,
        queue=envelope.queue,
        task=envelope.task,
        args=args,
        kwargs=kwargs,
        attempt=lease.attempt,
        max_attempts=envelope.retries.max_attempts,
        losses=lease.losses,
        ttr=lease.deadline,
        timeout=envelope.timeout or None,
        created=envelope.created,
        priority=priority_of(lease.rank),
        key=envelope.key or None,
        limit=LimitOf(limit.name, limit.key) if limit else None,
        schedule=planned.schedule if planned else None,
        planned=planned.time if planned else None,
        tags=list(envelope.tags),
        headers=envelope.headers,
    )
    data, encoding = as_json(out)
    if encoding != "json":
        raise CodecError(
            f"the arguments of {envelope.task} cannot be written as JSON, so no worker over HTTP "
            "can run it; use texts, numbers, lists and objects as arguments"
        )
    return data  # type: ignore[no-any-return]  # encoded already


ENDPOINTS = (Endpoint("POST", "/v1/tasks/reserve", reserve_tasks, checks_queues=True),)
