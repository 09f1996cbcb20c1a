"""Changes of all jobs that match conditions: cancel, kick, alter, delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.brokers.contract.features import Feature
from tidemill.core.config import check_alter
from tidemill.server.http.answer_size import AT_ONCE
from tidemill.server.http.api.jobs import filter_of, kick
from tidemill.server.http.call import Call
from tidemill.server.http.endpoints import Endpoint
from tidemill.server.http.queue_permissions import check_queues
from tidemill.server.http.schemas.jobs import (
    Acted,
    AlterMatching,
    CancelMatching,
    KickMatching,
    Matching,
)
from tidemill.server.tokens import Role


async def cancel_matching(call: Call, body: CancelMatching) -> Acted:
    """Cancel matching jobs, the newest first."""
    broker = call.backend.mill.broker
    call.backend.mill.runtime.features.need(Feature.CANCEL, "cancel")
    return await _act(call, body, lambda ids: broker.cancel(ids, terminate=body.terminate))


async def kick_matching(call: Call, body: KickMatching) -> Acted:
    """Make matching jobs ready again, the newest first."""
    return await _act(call, body, lambda ids: kick(call, ids, force=body.force))


async def alter_matching(call: Call, body: AlterMatching) -> Acted:
    """Give matching jobs that wait another priority, or move them to another queue."""
    rank, queue = check_alter(body.to_priority, body.to_queue)
    check_queues(call.exchange, [queue] if queue else ())
    broker = call.backend.mill.broker
    call.backend.mill.runtime.features.need(Feature.ALTER, "alter")
    return await _act(call, body, lambda ids: broker.alter(ids, rank=rank, queue=queue))


async def delete_matching(call: Call, body: Matching) -> Acted:
    """Delete matching jobs, the newest first."""
    return await _act(call, body, call.backend.mill.broker.delete)


async def _act(call: Call, body: Matching, act: Callable[[Sequence[str]], list[bool]]) -> Acted:
    what, mill = filter_of(call, body), call.backend.mill
    mill.runtime.features.need(Feature.FAILED, "jobs that match")

    def run() -> Acted:
        ids: list[str] = []
        most = int(body.limit)
        cursor = ""
        while len(ids) < most:
            page = mill.find(what, limit=min(most - len(ids), AT_ONCE), cursor=cursor)
            ids += [record.envelope.id for record in page.records]
            cursor = page.cursor
            if not cursor:
                break
        return Acted(ids, act(ids) if ids else [], bool(cursor))

    return await call.backend.run(run)


OPERATOR = Role.OPERATOR
ENDPOINTS = (
    Endpoint("POST", "/v1/matching/cancel", cancel_matching, OPERATOR, checks_queues=True),
    Endpoint("POST", "/v1/matching/kick", kick_matching, OPERATOR, checks_queues=True),
    Endpoint("POST", "/v1/matching/alter", alter_matching, OPERATOR, checks_queues=True),
    Endpoint("POST", "/v1/matching/delete", delete_matching, OPERATOR, checks_queues=True),
)
