"""Messages: put and reserve them. They are settled in :mod:`.reservations`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.exchange import Mode
from tidemill.brokers.contract.features import Feature
from tidemill.core.config import check_name
from tidemill.core.envelope import Envelope
from tidemill.core.errors import CodecError
from tidemill.core.job import Verdict
from tidemill.core.priority import priority_of
from tidemill.core.signatures import refusal
from tidemill.server.delivery import deliver
from tidemill.server.http.api.jobs import options_of, placed
from tidemill.server.http.bodies import body_out, check_json
from tidemill.server.http.call import Call
from tidemill.server.http.endpoints import Endpoint, Raw, json_of
from tidemill.server.http.exchange import SMALL, ClientGone
from tidemill.server.http.problems import Problem
from tidemill.server.http.queue_permissions import check_put, check_queues
from tidemill.server.http.receipts import receipt_of
from tidemill.server.http.schemas.jobs import MessageOptions, Placed
from tidemill.server.http.schemas.messages import Reserved, ReservedMany, ReserveIn
from tidemill.server.tokens import Role
from tidemill.server.waiters import ReservedJob, size_of

log = logging.getLogger("tidemill.server")


async def put_message(call: Call, queue: str, query: MessageOptions, body: Raw) -> Placed:
    """Put the request's body as a message: JSON if its Content-Type is JSON, else bytes.

    Options are query parameters: ``?delay=60&priority=5``.
    """

    def make() -> Envelope:
        return call.backend.queue(queue).envelope(value_of(body), **options_of(query))

    envelope = await call.compute(make, len(body.data))
    check_put(call.exchange, [envelope], [query])
    (put,) = await call.backend.put([envelope])
    return placed(call, put)


def value_of(body: Raw) -> Any:
    """The message in a body: JSON if its Content-Type is JSON, else bytes.

    Raises:
        Problem: the body is a form, or is not JSON although its Content-Type says so.
    """
    kind = body.content_type.partition(";")[0].strip().lower()
    if kind in ("application/x-www-form-urlencoded", "multipart/form-data"):
        raise Problem(
            "unsupported-media-type",
            "the Content-Type of a message must be application/json, as curl --json sends it, or "
            "application/octet-stream",
        )
    if kind == "application/json" or kind.endswith("+json"):
        check_json(len(body.data))
        return json_of(body.data)
    return body.data


async def reserve(call: Call, body: ReserveIn) -> ReservedMany:
    """Reserve messages; wait up to ``timeout`` seconds for the first message.

    Each message is reserved until its ttr is over. Settle it with its receipt before that.
    """
    backend = call.backend
    queues = [check_name("queue", name) for name in dict.fromkeys(body.queues)]
    check_queues(call.exchange, queues)
    mode = Mode(body.order)
    if mode is Mode.MERGED:
        backend.mill.runtime.features.need(Feature.MERGED, "order merged")
    timeout = min(body.timeout, backend.settings.longest_poll)
    call.exchange.leaving()  # a client that has left gets no messages
    work = backend.shared_owner.reserve(queues, int(body.count), timeout, mode)
    if timeout:
        found = await backend.poll(call.exchange, work, [])
    else:
        found = await work
    # Messages are encoded before they are acknowledged: an unreadable message must not be lost.
    try:
        size = sum(size_of(job.lease) for job in found)
        if size > SMALL:
            call.exchange.share.take(size)
        shown, refused = await call.compute(lambda: _shown(call, found), size)
    except BaseException:
        backend.shared_owner.give_all_back(found)
        raise
    for verdict in refused:
        backend.shared_owner.settle_later(verdict)
    usable = [job for job in found if job.lease.token in shown]
    exchange = call.exchange
    delivered = await deliver(backend.shared_owner, usable, lambda: exchange.has_left)
    if exchange.has_left:
        raise ClientGone
    # ``shown`` holds encoded messages, which encode as Reserved does.
    return ReservedMany([shown[job.lease.token] for job in delivered])  # type: ignore[misc]


def _shown(
    call: Call, found: Sequence[ReservedJob]
) -> tuple[dict[int, msgspec.Raw], list[Verdict]]:
    """Messages in JSON by their tokens, and verdicts on messages that cannot be decoded."""
    shown: dict[int, msgspec.Raw] = {}
    refused: list[Verdict] = []
    for job in found:
        try:
            out = _reserved(call, job)
        except CodecError as error:
            log.warning("message %s of queue %s: %s", job.envelope.id, job.envelope.queue, error)
            refused.append(refusal(job.lease, error))
        else:
            shown[job.lease.token] = msgspec.Raw(msgspec.json.encode(out))
    return shown, refused


def _reserved(call: Call, job: ReservedJob) -> Reserved:
    backend, lease, envelope = call.backend, job.lease, job.envelope
    receipt = receipt_of(backend.shared_owner.owner.id, lease.token, once=envelope.at_most_once)
    body, encoding = body_out(backend.mill, envelope)
    return Reserved(
        receipt=call.sealed(receipt),
        id=envelope.id,
        queue=envelope.queue,
        body=body,
        encoding=encoding,  # type: ignore[arg-type]  # one of the three encodings
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
    Endpoint("POST", "/v1/reserve", reserve, Role.OPERATOR, checks_queues=True),
)
