"""Reservations: settle reserved jobs or extend their ttr, one or many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from tidemill.core.clock import clock
from tidemill.core.codec import pack_result
from tidemill.core.config import storable
from tidemill.core.job import Note, Outcome, Record, State, Verdict
from tidemill.core.retry import backoff
from tidemill.core.signatures import sign_handed_on
from tidemill.errors import CodecError, InvalidOption
from tidemill.server.http.bodies import bytes_of
from tidemill.server.http.endpoints import Call, Endpoint
from tidemill.server.http.problems import Problem
from tidemill.server.http.receipts import Receipt
from tidemill.server.http.schemas import reservations as schemas
from tidemill.server.http.schemas.jobs import Done

T = TypeVar("T")

_ERROR_MOST, _TRACE_MOST, _LINE_MOST = 2000, 20_000, 2000
"""The most characters that are stored of an error, a traceback and a log line."""


def verdict_of(
    token: int, outcome: Outcome, *, error: str = "", traceback: str = "", **more: Any
) -> Verdict:
    """A verdict on an attempt that ends now; long texts are cut."""
    error, traceback = storable(error)[:_ERROR_MOST], storable(traceback)[-_TRACE_MOST:]
    return Verdict(token, outcome, error=error, traceback=traceback, ended=clock.wall(), **more)


async def _settle(call: Call, receipt: Receipt, outcome: Outcome, **more: Any) -> None:
    verdict = verdict_of(receipt.token, outcome, **more)
    if receipt.hands_on:
        sign_handed_on(verdict, receipt.job_id, call.backend.mill.runtime.keys)
    if not await call.backend.settle(receipt, verdict):
        raise _lost()


def _line(text: str) -> str:
    return storable(text)[:_LINE_MOST]


def _lost() -> Problem:
    return Problem(
        "lease-lost",
        "the reservation has ended: the job was not settled within its ttr, or was deleted. "
        "Another client may have it now. Touch the job while you work, or put it with a longer ttr",
    )


# -- messages and tasks ---------------------------------------------------------------------------


async def ack(call: Call, receipt: str) -> None:
    """Acknowledge a job: a message is deleted, a task has succeeded.

    The request can be repeated when its answer was lost.
    """
    await _settle(call, call.parse(receipt), Outcome.SUCCESS)


async def release(call: Call, receipt: str, body: schemas.ReleaseIn) -> None:
    """Release a job back into its queue. With an error the attempt counts."""
    it = call.parse(receipt)
    if body.error is None:
        await _settle(call, it, Outcome.RELEASE, delay=body.delay)
        return
    delay = body.delay or (await _policy_delay(call, it) if it.job_id else 0.0)
    await _settle(call, it, Outcome.RETRY, delay=delay, error=body.error)


async def bury(call: Call, receipt: str, body: schemas.BuryIn) -> None:
    """Bury a job: it fails, and is kept until somebody inspects and retries it."""
    await _settle(call, call.parse(receipt), Outcome.FAIL, error=body.reason)


async def touch(call: Call, receipt: str, body: schemas.TouchIn) -> None:
    """Touch a job: its ttr starts again, or a new ttr starts."""
    if not await call.backend.touch(call.parse(receipt), body.ttr or 0.0):
        raise _lost()


# -- many -----------------------------------------------------------------------------------------


async def ack_many(call: Call, body: schemas.Receipts) -> Done:
    """Acknowledge many jobs. True also for jobs acknowledged before; false for lost jobs."""
    return await _each(body.receipts, lambda receipt: ack(call, receipt))


async def complete_many(call: Call, body: schemas.CompleteMany) -> Done:
    """Complete many tasks, each with its result.

    True also for tasks completed before; false for lost tasks, and for receipts of messages. If a
    result cannot be stored, the request is refused, and completes nothing.
    """
    done = [one.receipt for one in body.results]
    results = await call.compute(lambda: [*map(_packed, body.results)], 0)
    body.results = []
    return await _each(zip(done, results, strict=True), lambda one: _complete(call, one[0], one[1]))


async def release_many(call: Call, body: schemas.ReleaseMany) -> Done:
    """Release many jobs. With an error each attempt counts."""
    how = schemas.ReleaseIn(body.delay, body.error)
    return await _each(body.receipts, lambda receipt: release(call, receipt, how))


async def bury_many(call: Call, body: schemas.BuryMany) -> Done:
    """Bury many jobs."""
    return await _each(
        body.receipts, lambda receipt: bury(call, receipt, schemas.BuryIn(body.reason))
    )


async def touch_many(call: Call, body: schemas.TouchMany) -> Done:
    """Touch many jobs. False for jobs that were lost or are settled."""
    return await _each(
        body.receipts, lambda receipt: touch(call, receipt, schemas.TouchIn(body.ttr))
    )


async def _each(items: Iterable[T], act: Callable[[T], Awaitable[None]]) -> Done:
    """Act on each item, and return which actions succeeded. The actions share commits."""

    async def one(item: T) -> bool:
        try:
            await act(item)
        except Problem:
            return False
        return True

    return Done(list(await asyncio.gather(*map(one, items))))


# -- tasks ----------------------------------------------------------------------------------------


async def heartbeat(call: Call, receipt: str, body: schemas.HeartbeatIn) -> schemas.HeartbeatOut:
    """Extend the ttr of a task, and report its progress.

    The answer says whether the worker must stop. A job beyond its timeout gets no more time. The
    receipt of a message is refused.
    """
    it = _task(call, receipt)
    record = await _record(call, it)
    now = clock.wall()
    timeout = record.envelope.timeout
    if timeout and record.leased and now > record.leased + timeout:
        if record.state is not State.RUNNING:
            raise _lost()
        return schemas.HeartbeatOut("timeout")
    notes = [Note(it.token, line=_line(line), time=now) for line in body.log]
    if body.progress is not None:
        notes.append(Note(it.token, body.progress, body.total, text=_line(body.text)))
    if not await call.backend.touch(it, body.ttr or 0.0, notes):
        raise _lost()
    return schemas.HeartbeatOut("cancelled" if record.cancelling else None)


async def complete(call: Call, receipt: str, body: schemas.CompleteIn) -> None:
    """Complete a task with its result.

    The request can be repeated when its answer was lost. The receipt of a message is refused.
    """
    result = await call.compute(lambda: _packed(body), 0)
    body.result = None  # frees memory: the decoded result is many times larger than its JSON
    await _complete(call, receipt, result)


async def _complete(call: Call, receipt: str, result: bytes) -> None:
    await _settle(call, _task(call, receipt), Outcome.SUCCESS, result=result)


def _packed(body: schemas.CompleteIn) -> bytes:
    value = body.result if body.encoding == "json" else bytes_of("result", body.result)
    try:
        return pack_result(value)
    except CodecError as error:
        raise InvalidOption(f"result: {error}") from None


async def fail(call: Call, receipt: str, body: schemas.FailIn) -> None:
    """Fail an attempt of a task: the attempt counts, and the task runs again after its backoff.

    Without ``retry``, or after the last attempt, the job has failed. The receipt of a message is
    refused.
    """
    it, delay = _task(call, receipt), body.delay or 0.0
    if body.retry and body.delay is None:
        delay = await _policy_delay(call, it)
    outcome = Outcome.RETRY if body.retry else Outcome.FAIL
    texts = {"error": body.error, "traceback": body.traceback}
    await _settle(call, it, outcome, delay=delay, **texts)


async def stopped(call: Call, receipt: str, body: schemas.StoppedIn) -> None:
    """Report that the worker has stopped a cancelled task. The receipt of a message is refused."""
    await _settle(call, _task(call, receipt), Outcome.CANCELLED, error=body.reason)


def _task(call: Call, receipt: str) -> Receipt:
    it = call.parse(receipt)
    if not it.job_id:
        raise Problem(
            "invalid-request",
            "the receipt belongs to a message, and this call is for tasks; ack, release, touch or "
            "bury the message",
        )
    return it


async def _record(call: Call, receipt: Receipt) -> Record:
    backend = call.backend
    record = await backend.run(backend.mill.broker.get, receipt.job_id)
    if record is None:
        raise _lost()
    return record


async def _policy_delay(call: Call, receipt: Receipt) -> float:
    """Seconds until a task runs again if its attempt fails now, from its retry policy."""
    record = await call.backend.run(call.backend.mill.broker.get, receipt.job_id)
    return 0.0 if record is None else backoff(record.envelope.retries, record.attempt + 1)


ENDPOINTS = (
    *(
        Endpoint("POST", f"/v1/reservations/{{receipt}}/{act.__name__}", act, also=(409,))
        for act in (ack, release, touch, bury, fail, stopped)
    ),
    Endpoint("POST", "/v1/reservations/{receipt}/complete", complete, also=(409,)),
    Endpoint("POST", "/v1/reservations/{receipt}/heartbeat", heartbeat, also=(409,)),
    Endpoint("POST", "/v1/ack", ack_many, checks_queues=True),
    Endpoint("POST", "/v1/complete", complete_many, checks_queues=True),
    Endpoint("POST", "/v1/release", release_many, checks_queues=True),
    Endpoint("POST", "/v1/touch", touch_many, checks_queues=True),
    Endpoint("POST", "/v1/bury", bury_many, checks_queues=True),
)
