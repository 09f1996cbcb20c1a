"""Messages: put whatever it is, reserve, acknowledge, release, touch, bury."""

from __future__ import annotations

from typing import Any

from tidemill.brokers.base import Feature, Mode
from tidemill.clock import wall_time
from tidemill.config import storable
from tidemill.errors import CodecError
from tidemill.job import Outcome, Verdict, priority_of
from tidemill.server.api.jobs import options_of, placed
from tidemill.server.bodies import body_out
from tidemill.server.desk import Held
from tidemill.server.endpoints import Call, Endpoint, Raw, json_of
from tidemill.server.problems import Problem
from tidemill.server.receipts import receipt_of
from tidemill.server.shapes.jobs import Done, MessageOptions, Placed
from tidemill.server.shapes.messages import (
    BuryIn,
    Receipts,
    ReleaseIn,
    Reserved,
    ReservedMany,
    ReserveIn,
    TouchIn,
)
from tidemill.server.tokens import Role

__all__ = ["ENDPOINTS"]


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
    value: Any = json_of(body.data) if is_json else body.data
    envelope = call.backend.queue(queue).envelope(value, **options_of(query))
    (put,) = await call.backend.put([envelope])
    return placed(call, put)


async def reserve(call: Call, body: ReserveIn) -> ReservedMany:
    """Take messages; waits until there is one, or the time is over.

    Each is yours until its ttr is over, and is to be settled with its receipt by then.
    """
    backend, queues = call.backend, list(dict.fromkeys(body.queues))
    mode = Mode(body.order)
    if mode is Mode.MERGED:
        backend.mill.features.need(Feature.MERGED, "order merged")
    timeout = min(body.timeout, backend.settings.longest_poll)
    work = backend.desk.reserve(queues, body.count, timeout, mode)
    if timeout:
        found = await backend.polls.wait(call.exchange, work, [])
    else:
        found = await work
    return ReservedMany([out for held in found if (out := await _reserved(call, held))])


async def _reserved(call: Call, held: Held) -> Reserved | None:
    lease, envelope = held.lease, held.envelope
    try:
        body, encoding = body_out(call.backend.mill, envelope)
    except CodecError as error:  # not to be trusted: it has failed for that
        await call.backend.desk.settle(_verdict(lease.token, Outcome.FAIL, error=str(error)))
        return None
    return Reserved(
        receipt=receipt_of(call.backend.desk.owner.id, lease.token),
        id=envelope.id,
        queue=envelope.queue,
        body=body,
        encoding=encoding,  # type: ignore[arg-type]  # one of the three
        attempt=lease.attempt,
        ttr=lease.deadline or None,
        created=envelope.created,
        priority=priority_of(lease.rank),
        key=envelope.key or None,
        tags=list(envelope.tags),
        headers=envelope.headers,
    )


def _verdict(token: int, outcome: Outcome, *, delay: float = 0.0, error: str = "") -> Verdict:
    return Verdict(token, outcome, delay=delay, error=storable(error)[:2000], ended=wall_time())


async def _settle(call: Call, receipt: str, outcome: Outcome, **more: Any) -> None:
    if not await call.backend.settle(receipt, lambda token: _verdict(token, outcome, **more)):
        raise _lost()


def _lost() -> Problem:
    return Problem(
        "lease-lost",
        "the message was not settled within its ttr, or has been settled; somebody else may "
        "have it now. Touch it while you work, or put it with more ttr",
    )


async def ack(call: Call, receipt: str) -> None:
    """It is done: forget it."""
    await _settle(call, receipt, Outcome.SUCCESS)


async def release(call: Call, receipt: str, body: ReleaseIn) -> None:
    """Back into its queue, as if it had not been taken; with an error, counted as an attempt."""
    outcome = Outcome.RELEASE if body.error is None else Outcome.RETRY
    await _settle(call, receipt, outcome, delay=body.delay, error=body.error or "")


async def bury(call: Call, receipt: str, body: BuryIn) -> None:
    """It cannot be done: keep it, failed, for a person to look at and kick."""
    await _settle(call, receipt, Outcome.FAIL, error=body.reason)


async def touch(call: Call, receipt: str, body: TouchIn) -> None:
    """More time: the ttr begins anew, or with another value."""
    if not await call.backend.touch(receipt, body.ttr or 0.0):
        raise _lost()


async def ack_many(call: Call, body: Receipts) -> Done:
    """Acknowledge many; false for each that was lost."""
    verdict = _verdict_of_ack
    return Done(await call.backend.settle_all(body.receipts, verdict))


def _verdict_of_ack(token: int) -> Verdict:
    return _verdict(token, Outcome.SUCCESS)


ENDPOINTS = (
    Endpoint(
        *("POST", "/v1/queues/{queue}/messages", put_message, Role.OPERATOR),
        status=201,
        also=(200, 409, 507),
    ),
    Endpoint("POST", "/v1/reserve", reserve, Role.OPERATOR),
    Endpoint("POST", "/v1/ack", ack_many, Role.OPERATOR),
    *(
        Endpoint(
            *("POST", f"/v1/reservations/{{receipt}}/{act.__name__}", act, Role.OPERATOR),
            status=204,
            also=(409,),
        )
        for act in (ack, release, touch, bury)
    ),
)
