"""Messages: put whatever it is, and reserve; what then becomes of it is in :mod:`.reservations`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.brokers.base import Feature, Mode
from tidemill.config import check_name
from tidemill.errors import CodecError
from tidemill.job import Envelope, Verdict, priority_of
from tidemill.server.api.jobs import options_of, placed
from tidemill.server.asks import size_of
from tidemill.server.batches import check_json
from tidemill.server.bodies import body_out
from tidemill.server.budget import SMALL
from tidemill.server.delivery import deliver
from tidemill.server.desk import Held
from tidemill.server.edge import Gone
from tidemill.server.endpoints import Call, Endpoint, Raw, json_of
from tidemill.server.problems import Problem
from tidemill.server.queue_tokens import check_put, check_queues
from tidemill.server.receipts import receipt_of
from tidemill.server.shapes.jobs import MessageOptions, Placed
from tidemill.server.shapes.messages import Reserved, ReservedMany, ReserveIn
from tidemill.server.tokens import Role
from tidemill.trust import refusal

__all__ = ["ENDPOINTS"]

log = logging.getLogger("tidemill.server")


async def put_message(call: Call, queue: str, query: MessageOptions, body: Raw) -> Placed:
    """Put the body as it is: JSON when its type says so, else bytes.

    Options are parameters of the query: ``?delay=60&priority=5``.
    """
    kind = body.content_type.partition(";")[0].strip().lower()
    if kind in ("application/x-www-form-urlencoded", "multipart/form-data"):
        raise Problem(
            "unsupported-media-type",
            "say what the body is: Content-Type: application/json, as curl --json does, or "
            "application/octet-stream",
        )
    is_json = kind == "application/json" or kind.endswith("+json")

    def make() -> Envelope:
        value: Any = body.data
        if is_json:
            check_json(len(body.data))
            value = json_of(body.data)
        return call.backend.queue(queue).envelope(value, **options_of(query))

    envelope = await call.beside(make, len(body.data))
    check_put(call.exchange, [envelope])
    (put,) = await call.backend.put([envelope])
    return placed(call, put)


async def reserve(call: Call, body: ReserveIn) -> ReservedMany:
    """Take messages; waits until there is one, or the time is over.

    Each is yours until its ttr is over, and is to be settled with its receipt by then.
    """
    backend = call.backend
    queues = [check_name("queue", name) for name in dict.fromkeys(body.queues)]
    check_queues(call.exchange, queues)
    mode = Mode(body.order)
    if mode is Mode.MERGED:
        backend.mill.features.need(Feature.MERGED, "order merged")
    timeout = min(body.timeout, backend.settings.longest_poll)
    work = backend.desk.reserve(queues, int(body.count), timeout, mode)
    if timeout:
        found = await backend.polls.wait(call.exchange, work, [])
    else:
        found = await work
    # Encoded before it is acknowledged: what cannot be shown must not be lost.
    try:
        size = sum(size_of(held.lease) for held in found)
        if size > SMALL:
            call.exchange.share.take(size)
        shown, refused = await call.beside(lambda: _shown(call, found), size)
    except BaseException:
        backend.desk.give_all_back(found)
        raise
    for verdict in refused:
        backend.desk.say(verdict)
    usable = [held for held in found if held.lease.token in shown]
    line = call.exchange.line
    delivered = await deliver(backend.desk, usable, lambda: line.lost)
    if line.lost:
        raise Gone
    # ``shown`` is typed for tasks too, which this call never reserves.
    return ReservedMany([shown[held.lease.token] for held in delivered])  # type: ignore[misc]


def _shown(call: Call, found: Sequence[Held]) -> tuple[dict[int, msgspec.Raw], list[Verdict]]:
    """Messages by token, as their client sees them; verdicts on those that cannot be shown."""
    shown: dict[int, msgspec.Raw] = {}
    refused: list[Verdict] = []
    for held in found:
        try:
            out = _reserved(call, held)
        except CodecError as error:
            log.warning("message %s of queue %s: %s", held.envelope.id, held.envelope.queue, error)
            refused.append(refusal(held.lease, error))
        else:
            shown[held.lease.token] = msgspec.Raw(msgspec.json.encode(out))
    return shown, refused


def _reserved(call: Call, held: Held) -> Reserved:
    backend, lease, envelope = call.backend, held.lease, held.envelope
    receipt = receipt_of(backend.desk.owner.id, lease.token, once=envelope.at_most_once)
    body, encoding = body_out(backend.mill, envelope)
    return Reserved(
        receipt=call.sealed(receipt),
        id=envelope.id,
        queue=envelope.queue,
        body=body,
        encoding=encoding,  # type: ignore[arg-type]  # one of the three
        attempt=lease.attempt,
        ttr=None if envelope.at_most_once else lease.deadline,
        created=envelope.created,
        priority=priority_of(lease.rank),
        key=envelope.key or None,
        tags=list(envelope.tags),
        headers=envelope.headers,
    )


ENDPOINTS = (
    Endpoint(
        *("POST", "/v1/queues/{queue}/messages", put_message, Role.OPERATOR),
        status=201,
        also=(200, 409, 507),
    ),
    Endpoint("POST", "/v1/reserve", reserve, Role.OPERATOR, limited=True),
)
