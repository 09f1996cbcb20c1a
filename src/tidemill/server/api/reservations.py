"""What becomes of a job in a client's hands: done, failed, given back, renewed; one or many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tidemill.clock import wall_time
from tidemill.codec import pack
from tidemill.config import storable
from tidemill.errors import CodecError, InvalidOption
from tidemill.job import Note, Outcome, Record, State, Verdict
from tidemill.retry import backoff
from tidemill.server.bodies import bytes_of
from tidemill.server.endpoints import Call, Endpoint
from tidemill.server.problems import Problem
from tidemill.server.receipts import Receipt
from tidemill.server.shapes.jobs import Done
from tidemill.server.shapes.messages import (
    BuryIn,
    BuryMany,
    Receipts,
    ReleaseIn,
    ReleaseMany,
    TouchIn,
    TouchMany,
)
from tidemill.server.shapes.tasks import (
    CompleteIn,
    FailIn,
    HeartbeatIn,
    HeartbeatOut,
    StoppedIn,
)
from tidemill.server.tokens import Role

__all__ = ["ENDPOINTS", "verdict_of"]

_ERROR_MOST, _TRACE_MOST, _LINE_MOST = 2000, 20_000, 2000
"""Characters that are kept."""


def verdict_of(
    token: int, outcome: Outcome, *, error: str = "", traceback: str = "", **more: Any
) -> Verdict:
    """A verdict of now, with texts as stores keep them."""
    error, traceback = storable(error)[:_ERROR_MOST], storable(traceback)[-_TRACE_MOST:]
    return Verdict(
        token, outcome, error=error, traceback=traceback, ended=wall_time(), **more
    )


async def _settle(call: Call, receipt: Receipt, outcome: Outcome, **more: Any) -> None:
    if not await call.backend.settle(receipt, verdict_of(receipt.token, outcome, **more)):
        raise _lost()


def _lost() -> Problem:
    return Problem(
        "lease-lost",
        "the job was not settled within its ttr, or was deleted; somebody else may have it "
        "now. Touch it while you work, or put a message with more ttr",
    )


# -- messages and tasks ---------------------------------------------------------------------------


async def ack(call: Call, receipt: str) -> None:
    """Forget a message that is done; a task succeeds. Safe to send again if the answer was lost."""
    await _settle(call, call.parse(receipt), Outcome.SUCCESS)


async def release(call: Call, receipt: str, body: ReleaseIn) -> None:
    """Back into its queue, as if it had not been taken; with an error, counted as an attempt."""
    await _release(call, receipt, body)


async def _release(call: Call, receipt: str, body: ReleaseIn) -> None:
    it = call.parse(receipt)
    if body.error is None:
        await _settle(call, it, Outcome.RELEASE, delay=body.delay)
        return
    delay = body.delay or (await _policy_delay(call, it) if it.job_id else 0.0)
    await _settle(call, it, Outcome.RETRY, delay=delay, error=body.error)


async def bury(call: Call, receipt: str, body: BuryIn) -> None:
    """It cannot be done: keep it, failed, for a person to look at and kick."""
    await _settle(call, call.parse(receipt), Outcome.FAIL, error=body.reason)


async def touch(call: Call, receipt: str, body: TouchIn) -> None:
    """More time: the ttr begins anew, or with another value."""
    if not await call.backend.touch(call.parse(receipt), body.ttr or 0.0):
        raise _lost()


# -- many -----------------------------------------------------------------------------------------


async def ack_many(call: Call, body: Receipts) -> Done:
    """Acknowledge many; true also for those acknowledged before, false for each that was lost."""
    return await _each(body, lambda receipt: ack(call, receipt))


async def release_many(call: Call, body: ReleaseMany) -> Done:
    """Release many; with an error, each is counted as an attempt."""
    how = ReleaseIn(body.delay, body.error)
    return await _each(body, lambda receipt: _release(call, receipt, how))


async def bury_many(call: Call, body: BuryMany) -> Done:
    """Bury many."""
    return await _each(body, lambda receipt: bury(call, receipt, BuryIn(body.reason)))


async def touch_many(call: Call, body: TouchMany) -> Done:
    """Give many more time; false for each that was lost or is settled."""
    return await _each(body, lambda receipt: touch(call, receipt, TouchIn(body.ttr)))


async def _each(body: Receipts, act: Callable[[str], Awaitable[None]]) -> Done:
    """Whether it was done, for each; they share commits."""

    async def one(receipt: str) -> bool:
        try:
            await act(receipt)
        except Problem:
            return False
        return True

    return Done(list(await asyncio.gather(*map(one, body.receipts))))


# -- tasks ----------------------------------------------------------------------------------------


async def heartbeat(call: Call, receipt: str, body: HeartbeatIn) -> HeartbeatOut:
    """The worker of a task lives: more time, and what it says of its progress.

    The answer says when it is to stop. A job beyond its timeout gets no more time. The receipt of a
    message is refused.
    """
    it = _task(call, receipt)
    record = await _record(call, it)
    now = wall_time()
    timeout = record.envelope.timeout
    late = bool(timeout and record.leased and now > record.leased + timeout)
    if late:
        if record.state is not State.RUNNING:
            raise _lost()
        return HeartbeatOut("timeout")
    notes = [Note(it.token, line=storable(line)[:_LINE_MOST], time=now) for line in body.log]
    if body.progress is not None:
        notes.append(Note(it.token, body.progress, body.total))
    if not await call.backend.touch(it, body.ttr or 0.0, notes):
        raise _lost()
    return HeartbeatOut("cancelled" if record.cancelling else None)


async def complete(call: Call, receipt: str, body: CompleteIn) -> None:
    """The task is done, with a result. Safe to send again when the answer was lost.

    The receipt of a message is refused.
    """
    it = _task(call, receipt)

    def make() -> bytes:
        value = body.result if body.encoding == "json" else bytes_of("result", body.result)
        try:
            return pack(value) if value is not None else b""
        except CodecError as error:
            raise InvalidOption(f"result: {error}") from None

    result = await call.beside(make, 0)
    body.result = None  # it takes many times its bytes
    await _settle(call, it, Outcome.SUCCESS, result=result)


async def fail(call: Call, receipt: str, body: FailIn) -> None:
    """The attempt failed: it counts, and is made again after the task's backoff.

    Without ``retry``, or when it was the last attempt, the job has failed. The receipt of a message
    is refused.
    """
    it, delay = _task(call, receipt), body.delay or 0.0
    if body.retry and body.delay is None:
        delay = await _policy_delay(call, it)
    outcome = Outcome.RETRY if body.retry else Outcome.FAIL
    said = {"error": body.error, "traceback": body.traceback}
    await _settle(call, it, outcome, delay=delay, **said)


async def stopped(call: Call, receipt: str, body: StoppedIn) -> None:
    """The worker has stopped, since the job is cancelled. The receipt of a message is refused."""
    await _settle(call, _task(call, receipt), Outcome.CANCELLED, error=body.reason)


def _task(call: Call, receipt: str) -> Receipt:
    it = call.parse(receipt)
    if not it.job_id:
        raise Problem(
            "invalid-request",
            "the receipt is that of a message, and this is for tasks; ack, release, touch or bury "
            "the message",
        )
    return it


async def _record(call: Call, receipt: Receipt) -> Record:
    backend = call.backend
    record = await backend.run(backend.mill.broker.get, receipt.job_id)
    if record is None:
        raise _lost()
    return record


async def _policy_delay(call: Call, receipt: Receipt) -> float:
    """Seconds until a task runs again whose attempt fails now, as its own policy has it."""
    record = await call.backend.run(call.backend.mill.broker.get, receipt.job_id)
    return 0.0 if record is None else backoff(record.envelope.retries, record.attempt + 1)


OPERATOR = Role.OPERATOR
ENDPOINTS = (
    *(
        Endpoint(
            *("POST", f"/v1/reservations/{{receipt}}/{act.__name__}", act, OPERATOR),
            status=204,
            also=(409,),
        )
        for act in (ack, release, touch, bury, fail, stopped)
    ),
    Endpoint(
        *("POST", "/v1/reservations/{receipt}/complete", complete, OPERATOR),
        status=204,
        also=(409,),
        makes=msgspec.json.Decoder(CompleteIn).decode,
    ),
    Endpoint("POST", "/v1/reservations/{receipt}/heartbeat", heartbeat, OPERATOR, also=(409,)),
    Endpoint("POST", "/v1/ack", ack_many, OPERATOR, limited=True),
    Endpoint("POST", "/v1/release", release_many, OPERATOR, limited=True),
    Endpoint("POST", "/v1/touch", touch_many, OPERATOR, limited=True),
    Endpoint("POST", "/v1/bury", bury_many, OPERATOR, limited=True),
)
