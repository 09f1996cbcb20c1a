"""Commands that reserve jobs: waiting for a job, or reserving a job by its number."""

from __future__ import annotations

import asyncio
import time

from tidemill.brokers.contract.exchange import Mode
from tidemill.core.errors import CodecError
from tidemill.core.signatures import hands_on, refusal
from tidemill.server.beanstalk.bodies import body_of
from tidemill.server.beanstalk.client import Client, Reservation
from tidemill.server.beanstalk.job_numbers import number_of
from tidemill.server.beanstalk.replies import DEADLINE_SOON, NOT_FOUND, TIMED_OUT, job_reply
from tidemill.server.beanstalk.shared_state import PortState
from tidemill.server.delivery import deliver
from tidemill.server.waiters import ReservedJob

LONGEST = 3600.0
"""Seconds of the longest single wait. A client that waits longer waits several times."""

_NEVER = float("inf")


async def reserve(port: PortState, client: Client, timeout: int | None = None) -> bytes:
    """Reserve the first job of all watched tubes, as if their jobs were in one queue."""
    client.works = True
    until = _NEVER if timeout is None else time.monotonic() + timeout
    client.wait(True)
    try:
        while True:
            warn = client.soonest()
            reply = await _look(port, client, until, warn)
            if reply is not None:
                return reply
            now = time.monotonic()
            if warn <= now:
                return DEADLINE_SOON
            if until <= now or client.has_ended or client.has_left or port.shared_owner.closing:
                return TIMED_OUT
    finally:
        client.wait(False)


async def _look(port: PortState, client: Client, until: float, warn: float) -> bytes | None:
    """Wait for a job until ``until`` or ``warn``; return the reply, or None without a job.

    The wait may run past the client's timeout. It never runs past the deadline warning or the end
    of a pause.
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
        if not interrupted:  # a second cancel would end the task
            interrupted = True
            task.cancel()

    client.interrupt = interrupt
    try:
        if not open_tubes:
            await asyncio.sleep(seconds)
            return None
        jobs = await port.shared_owner.reserve(open_tubes, 1, seconds, Mode.MERGED, latest)
    except asyncio.CancelledError:
        if not interrupted or task.uncancel() > 0:
            raise
        return None
    finally:
        client.interrupt = _nothing
    if not jobs:
        return None
    client.wait(False)  # from now on the client gets its answer, even if the port closes
    try:
        return await _taken(port, client, jobs[0])
    finally:
        client.wait(True)


async def _taken(port: PortState, client: Client, held: ReservedJob) -> bytes | None:
    """The reply with a reserved job; None when it cannot be decoded, or is lost.

    A job that cannot be decoded is buried. A pickled job is released if the app has no secret keys.
    """
    lease, envelope, commit = held
    try:
        body = body_of(port.mill, envelope)
    except CodecError as error:
        await port.shared_owner.settle(refusal(lease, error), commit)
        return None
    try:
        number = number_of(envelope.id)
        if number is None:
            number = await port.numbers.of(envelope.id)
    except BaseException:
        port.shared_owner.give_back(lease.token, commit)
        raise
    if commit is not None and commit.failed:
        return None
    if not await deliver(port.shared_owner, [held], lambda: client.has_left):
        return None
    port.counters_of(number).reserves += 1
    ttr = 0.0 if envelope.at_most_once else lease.deadline
    token, leased = lease.token, lease.leased
    then = envelope.id if hands_on(envelope) else ""
    reservation = Reservation(number, envelope.queue, token, ttr, leased, _NEVER, commit, then)
    begin_ttr(client, reservation)
    return job_reply(b"RESERVED", number, body)


def begin_ttr(client: Client, reservation: Reservation) -> None:
    """Start the ttr of a reservation, or start it again."""
    reservation.deadline = time.monotonic() + reservation.ttr if reservation.ttr else _NEVER
    client.keep(reservation)


async def reserve_job(port: PortState, client: Client, number: int) -> bytes:
    """Reserve a ready, delayed or buried job by its number."""
    job_id = port.numbers.id_of(number)
    lease = await port.lease_named(job_id)
    if lease is None:
        return NOT_FOUND
    client.works = True
    return await _taken(port, client, ReservedJob(lease, lease.open())) or NOT_FOUND


def _nothing() -> None: ...
