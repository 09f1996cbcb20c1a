"""Tasks for workers in other languages: reserve calls by the names of tasks.

Calls are settled in :mod:`.reservations`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.exchange import Mode
from tidemill.brokers.contract.features import Feature
from tidemill.client.log_attributes import job_name
from tidemill.core.codec import unpack, unpack_pickle
from tidemill.core.config import check_name
from tidemill.core.errors import CodecError
from tidemill.core.job import Outcome, Verdict
from tidemill.core.priority import priority_of
from tidemill.core.retry import Fail, Skip, Snooze
from tidemill.core.signatures import hands_on, refusal, sign_handed_on, trusted
from tidemill.server.http.bodies import as_json
from tidemill.server.http.call import Call
from tidemill.server.http.endpoints import Endpoint
from tidemill.server.http.exchange import SMALL, ClientGone
from tidemill.server.http.queue_permissions import check_queues
from tidemill.server.http.receipts import receipt_of
from tidemill.server.http.schemas.jobs import LimitOf
from tidemill.server.http.schemas.tasks import ReservedTask, ReservedTasks, ReserveTasksIn
from tidemill.server.shared_owner import SharedOwner
from tidemill.server.tokens import Role
from tidemill.server.waiters import ANSWER_BYTES, ReservedJob, size_of
from tidemill.workflows.parent_results import ParentResults

log = logging.getLogger("tidemill.server")


async def reserve_tasks(call: Call, body: ReserveTasksIn) -> ReservedTasks:
    """Reserve calls of tasks; wait up to ``timeout`` seconds for the first call.

    Each call is reserved until its ttr is over. Send heartbeats meanwhile, then complete or fail
    it. Calls of other tasks in these queues go back, and are tried again later.
    """
    backend = call.backend
    backend.mill.runtime.features.need(Feature.RESULTS, "reserving tasks")
    if Mode(body.order) is Mode.MERGED:
        backend.mill.runtime.features.need(Feature.MERGED, "order merged")
    timeout = min(body.timeout, backend.settings.longest_poll)
    call.exchange.leaving()  # a client that has left gets no calls
    for name in list(body.tasks):
        check_name("task", name)
    queues = [check_name("queue", name) for name in dict.fromkeys(body.queues)]
    check_queues(call.exchange, queues)
    async with backend.task_owners.use(body.tasks) as shared_owner:
        work = shared_owner.reserve(queues, int(body.count), timeout, Mode(body.order))
        found = await backend.poll(call.exchange, work, []) if timeout else await work
        return ReservedTasks(await _hand_over(call, shared_owner, found))


async def _hand_over(
    call: Call, shared_owner: SharedOwner, found: Sequence[ReservedJob]
) -> list[Any]:
    """The calls in JSON. A call that cannot be decoded fails, or is released."""
    try:
        size = sum(size_of(job.lease) for job in found)
        if size > SMALL:
            call.exchange.share.take(size)
        if any(job.envelope.links is not None for job in found):  # the results of parents are read
            shown = await call.backend.run(_shown, call, shared_owner, found)
        else:
            shown = await call.compute(lambda: _shown(call, shared_owner, found), size)
        if call.exchange.has_left:
            raise ClientGone
    except BaseException:
        shared_owner.give_all_back(found)
        raise
    for verdict in shown.refused:
        shared_owner.settle_later(verdict)
    shared_owner.give_all_back(found[shown.seen :])
    return shown.jobs


class _Shown(NamedTuple):
    """The first ``seen`` calls: in JSON, or with verdicts that refuse them."""

    jobs: list[msgspec.Raw]
    refused: list[Verdict]
    seen: int


def _shown(call: Call, shared_owner: SharedOwner, found: Sequence[ReservedJob]) -> _Shown:
    """Encode calls until the answer is large enough: the results of parents may be large."""
    jobs: list[msgspec.Raw] = []
    refused: list[Verdict] = []
    left = ANSWER_BYTES
    for n, job in enumerate(found):
        if left <= 0:
            return _Shown(jobs, refused, n)
        try:
            data = _encoded(call, shared_owner, job)
        except (CodecError, Fail) as error:
            it = job.envelope
            log.warning("%s of queue %s: %s", job_name(it), it.queue, error)
            refused.append(refusal(job.lease, error))
        except Snooze as error:
            refused.append(
                Verdict(job.lease.token, Outcome.SNOOZE, delay=error.delay, error=str(error))
            )
        except Skip:
            skipped = Verdict(job.lease.token, Outcome.SUCCESS)
            if hands_on(job.envelope):
                sign_handed_on(skipped, job.envelope.id, call.backend.mill.runtime.keys)
            refused.append(skipped)
        else:
            jobs.append(data)
            left -= len(memoryview(data))
    return _Shown(jobs, refused, len(found))


def _encoded(call: Call, shared_owner: SharedOwner, job: ReservedJob) -> msgspec.Raw:
    """A call as JSON.

    Raises:
        CodecError: the call is not signed as it should be, or its arguments do not fit into JSON.
        Fail: the result of a parent is missing.
        Snooze, Skip: a parent was retried before the call ran.
    """
    mill, envelope = call.backend.mill, job.envelope
    trusted(envelope, mill.runtime.keys)
    args, kwargs = _arguments(mill, job)
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


def _arguments(mill: Tidemill, job: ReservedJob) -> tuple[Any, Any]:
    envelope = job.envelope
    value = unpack_pickle(envelope.body) if envelope.pickled else unpack(envelope.body)
    if not (isinstance(value, (list, tuple)) and len(value) == 2):
        raise CodecError("the arguments of the call cannot be read")
    if envelope.links is not None:
        value = ParentResults(mill.runtime, job.lease, envelope).fill(list(value))
    return value[0], value[1]


ENDPOINTS = (
    Endpoint("POST", "/v1/tasks/reserve", reserve_tasks, Role.OPERATOR, checks_queues=True),
)
