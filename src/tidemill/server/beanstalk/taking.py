"""Reserving: waiting for a job, or taking a named one."""

from __future__ import annotations

import asyncio
import time

from tidemill.brokers.base import Mode
from tidemill.errors import CodecError
from tidemill.server.beanstalk.backing import Backing
from tidemill.server.beanstalk.bodies import shown
from tidemill.server.beanstalk.client import Client, Hold
from tidemill.server.beanstalk.numbers import number_of
from tidemill.server.beanstalk.replies import DEADLINE_SOON, NOT_FOUND, TIMED_OUT, job_reply
from tidemill.server.delivery import deliver
from tidemill.server.desk import Held
from tidemill.trust import refusal

__all__ = ["begin_ttr", "reserve", "reserve_job"]

LONGEST = 3600.0
"""Seconds after which a wait begins anew."""

_NEVER = float("inf")


async def reserve(backing: Backing, client: Client, timeout: int | None = None) -> bytes:
    """The first job of the tubes that the client watches, across all of them in one order."""
    client.works = True
    until = _NEVER if timeout is None else time.monotonic() + timeout
    client.wait(True)
    try:
        while True:
            warn = client.soonest()
            reply = await _look(backing, client, until, warn)
            if reply is not None:
                return reply
            now = time.monotonic()
            if warn <= now:
                return DEADLINE_SOON
            if until <= now or client.has_ended or client.has_left or backing.desk.closing:
                return TIMED_OUT
    finally:
        client.wait(False)


async def _look(backing: Backing, client: Client, until: float, warn: float) -> bytes | None:
    """Wait for a job until then at most; what is to be said of it.

    The client's own time may be rounded up, but not that of its warning, nor the end of a pause.
    """
    now = time.monotonic()
    pauses = [left for tube in client.watch.values() if (left := tube.pause_left())]
    open_tubes = [n for n, t in client.watch.items() if not (pauses and t.pause_left())]
    latest = max(0.0, min(warn - now, *pauses, _NEVER))
    seconds = 0.0 if client.has_ended else max(0.0, min(LONGEST, until - now, latest))
    task = asyncio.current_task()
    assert task is not None
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if not interrupted:  # a second cancel would be the end of the task
            interrupted = True
            task.cancel()

    client.interrupt = interrupt
    try:
        if not open_tubes:
            await asyncio.sleep(seconds)
            return None
        jobs = await backing.desk.reserve(open_tubes, 1, seconds, Mode.MERGED, latest)
    except asyncio.CancelledError:
        if not interrupted or task.uncancel() > 0:
            raise
        return None
    finally:
        client.interrupt = _nothing
    if not jobs:
        return None
    client.wait(False)  # it gets an answer from now on, also when the port is closed
    try:
        return await _taken(backing, client, jobs[0])
    finally:
        client.wait(True)


async def _taken(backing: Backing, client: Client, held: Held) -> bytes | None:
    """Give the client its job; None when it cannot be shown, or is lost.

    A job that cannot be shown is buried, or comes again where this app lacks the keys.
    """
    lease, envelope, pledge = held
    try:
        body = shown(backing.mill, envelope)
    except CodecError as error:
        await backing.desk.settle(refusal(lease, error), pledge)
        return None
    try:
        number = number_of(envelope.id)
        if number is None:
            number = await backing.numbers.of(envelope.id)
    except BaseException:
        backing.desk.give_back(lease.token, pledge)
        raise
    if pledge is not None and pledge.broken:
        return None
    if not await deliver(backing.desk, [held], lambda: client.has_left):
        return None
    backing.tally(number).reserves += 1
    ttr = 0.0 if envelope.at_most_once else lease.deadline
    token, leased = lease.token, lease.leased
    hold = Hold(number, envelope.queue, token, ttr, leased, _NEVER, pledge)
    begin_ttr(client, hold)
    return job_reply(b"RESERVED", number, body)


def begin_ttr(client: Client, hold: Hold) -> None:
    """The time of a job begins, also anew."""
    hold.deadline = time.monotonic() + hold.ttr if hold.ttr else _NEVER
    client.keep(hold)


async def reserve_job(backing: Backing, client: Client, number: int) -> bytes:
    """A job by its number: one that is ready, delayed or buried."""
    job_id = backing.numbers.id_of(number)
    lease = await backing.lease_named(job_id)
    if lease is None:
        return NOT_FOUND
    client.works = True
    return await _taken(backing, client, Held(lease, lease.open())) or NOT_FOUND


def _nothing() -> None: ...
