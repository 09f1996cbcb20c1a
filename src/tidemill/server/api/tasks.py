"""Tasks for workers in other languages: reserve calls by the names of tasks.

What then becomes of a call is in :mod:`.reservations`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.base import Feature, Mode
from tidemill.codec import unpack, unpack_pickle
from tidemill.config import check_name
from tidemill.errors import CodecError
from tidemill.inputs import Filler
from tidemill.job import Verdict, priority_of
from tidemill.retry import Fail
from tidemill.server.asks import ENOUGH, size_of
from tidemill.server.bodies import as_json
from tidemill.server.budget import SMALL
from tidemill.server.desk import Desk, Held
from tidemill.server.edge import Gone
from tidemill.server.endpoints import Call, Endpoint
from tidemill.server.queue_tokens import check_queues
from tidemill.server.receipts import receipt_of
from tidemill.server.shapes.jobs import LimitOf
from tidemill.server.shapes.tasks import ReservedTask, ReservedTasks, ReserveTasksIn
from tidemill.server.tokens import Role
from tidemill.trust import refusal, trusted

__all__ = ["ENDPOINTS"]

log = logging.getLogger("tidemill.server")


async def reserve_tasks(call: Call, body: ReserveTasksIn) -> ReservedTasks:
    """Take calls of some tasks; waits until there is one, or the time is over.

    Each is yours until its ttr is over. Send heartbeats meanwhile, then complete it or fail it.
    Calls of other tasks in these queues are set aside for workers that know them.
    """
    backend = call.backend
    backend.mill.features.need(Feature.UNKNOWN, "reserving tasks")
    if Mode(body.order) is Mode.MERGED:
        backend.mill.features.need(Feature.MERGED, "order merged")
    timeout = min(body.timeout, backend.settings.longest_poll)
    for name in list(body.tasks):
        check_name("task", name)
    queues = [check_name("queue", name) for name in dict.fromkeys(body.queues)]
    check_queues(call.exchange, queues)
    async with backend.tasks.at(body.tasks) as desk:
        work = desk.reserve(queues, int(body.count), timeout, Mode(body.order))
        found = await backend.polls.wait(call.exchange, work, []) if timeout else await work
        return ReservedTasks(await _hand_over(call, desk, found))


async def _hand_over(call: Call, desk: Desk, found: Sequence[Held]) -> list[Any]:
    """The calls as their worker sees them. One that cannot be shown fails, or comes again."""
    try:
        size = sum(size_of(held.lease) for held in found)
        if size > SMALL:
            call.exchange.share.take(size)
        if any(held.envelope.links is not None for held in found):  # results may have to be read
            shown = await call.backend.run(_shown, call, desk, found)
        else:
            shown = await call.beside(lambda: _shown(call, desk, found), size)
        if call.exchange.line.lost:
            raise Gone
    except BaseException:
        desk.give_all_back(found)
        raise
    for verdict in shown.refused:
        desk.say(verdict)
    desk.give_all_back(found[shown.seen :])
    return shown.jobs


class _Shown(NamedTuple):
    """The first ``seen`` calls of some: in JSON, or refused."""

    jobs: list[msgspec.Raw]
    refused: list[Verdict]
    seen: int


def _shown(call: Call, desk: Desk, found: Sequence[Held]) -> _Shown:
    """Calls as JSON, until it is enough: results that are filled in may be large."""
    jobs: list[msgspec.Raw] = []
    refused: list[Verdict] = []
    left = ENOUGH
    for n, held in enumerate(found):
        if left <= 0:
            return _Shown(jobs, refused, n)
        try:
            data = _encoded(call, desk, held)
        except (CodecError, Fail) as error:
            it = held.envelope
            log.warning("job %s (%s) of queue %s: %s", it.id, it.task, it.queue, error)
            refused.append(refusal(held.lease, error))
        else:
            jobs.append(data)
            left -= len(memoryview(data))
    return _Shown(jobs, refused, len(found))


def _encoded(call: Call, desk: Desk, held: Held) -> msgspec.Raw:
    """A call as JSON.

    Raises:
        CodecError: it is not to be trusted, or JSON cannot say its arguments.
        Fail: a result that it takes is missing.
    """
    mill, envelope = call.backend.mill, held.envelope
    trusted(envelope, mill.keys)
    args, kwargs = _arguments(mill, held)
    lease, limit, planned = held.lease, envelope.limit, envelope.planned
    receipt = receipt_of(desk.owner.id, lease.token, envelope.id)
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
            "can run it; call it with texts, numbers, lists and objects"
        )
    return data  # type: ignore[no-any-return]  # encoded already


def _arguments(mill: Tidemill, held: Held) -> tuple[Any, Any]:
    envelope = held.envelope
    value = unpack_pickle(envelope.body) if envelope.pickled else unpack(envelope.body)
    if not (isinstance(value, (list, tuple)) and len(value) == 2):
        raise CodecError("the arguments of the call cannot be read")
    if envelope.links is not None:
        value = Filler(mill, held.lease, envelope).fill(list(value))
    return value[0], value[1]


ENDPOINTS = (
    Endpoint("POST", "/v1/tasks/reserve", reserve_tasks, Role.OPERATOR, limited=True),
)
