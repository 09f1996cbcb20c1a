"""The effect of each command.

A command returns its reply, or a coroutine that returns the reply. Every change is stored before
the reply is sent.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tidemill.brokers.contract.exchange import Mode
from tidemill.core.clock import clock
from tidemill.core.job import Outcome, Record, State, Verdict
from tidemill.core.signatures import hands_on, refusal, sign_handed_on
from tidemill.errors import BrokerUnavailable, CodecError, DuplicateJob
from tidemill.server.beanstalk import parser, stats
from tidemill.server.beanstalk.bodies import body_of, call_in, envelope_of
from tidemill.server.beanstalk.shared_state import Client, PortState, Reservation, id_of, number_of
from tidemill.server.delivery import deliver
from tidemill.server.waiters import ReservedJob

WATCHED_MOST = 1000  # the most tubes that one client may watch

KICKED_AT_ONCE = 1000

LONGEST_WAIT = 3600.0
"""Seconds of the longest single wait. A client that waits longer waits several times."""

_NEVER = float("inf")

Answer = bytes | Coroutine[Any, Any, bytes]


def answer(port: PortState, client: Client, command: parser.Command) -> Answer:
    if command.job is not None:
        client.produces = True
        return _put(port, client.use.name, command.job)
    return _HANDLERS[command.verb](port, client, *command.args)


async def _put(port: PortState, tube: str, job: parser.PutJob) -> bytes:
    if port.draining:
        return parser.DRAINING
    call = call_in(job.body) if port.tasks else None
    if call is not None and (stale := port.mill.runtime.declarations.stale([call.task])):
        await port.mill.runtime.threaded(port.mill.runtime.declarations.read, stale)
    clashes = 0
    while True:
        number = await port.numbers.draw()
        envelope = envelope_of(port.mill, tube, job, id_of(number), call)
        own = envelope.id == id_of(number)
        try:
            put = await port.mill.runtime.put_batching.put(envelope)
        except DuplicateJob as error:
            if not own:  # the user chose the id, and another job has it
                return b"INSERTED %d\r\n" % await port.numbers.of(error.job_id or envelope.id)
            clashes += 1
            await port.numbers.skip(1 << min(clashes, 40))
            continue
        if put.id != id_of(number):
            number = await port.numbers.of(put.id)
        return b"INSERTED %d\r\n" % number


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
                return b"DEADLINE_SOON\r\n"
            if until <= now or client.has_ended or client.has_left or port.shared_owner.closing:
                return parser.TIMED_OUT
    finally:
        client.wait(False)


async def _look(port: PortState, client: Client, until: float, warn: float) -> bytes | None:
    """Wait for a job, not past ``warn`` or a pause's end; the reply, or None without a job."""
    now = time.monotonic()
    pauses = [left for tube in client.watch.values() if (left := tube.pause_left())]
    open_tubes = [n for n, t in client.watch.items() if not (pauses and t.pause_left())]
    latest = max(0.0, min(warn - now, *pauses, _NEVER))
    seconds = 0.0 if client.has_ended else max(0.0, min(LONGEST_WAIT, until - now, latest))
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
    """The reply with a reserved job; None when it is lost, or unreadable and buried."""
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
    _begin_ttr(client, reservation)
    return parser.job_reply(b"RESERVED", number, body)


def _begin_ttr(client: Client, reservation: Reservation) -> None:
    reservation.deadline = time.monotonic() + reservation.ttr if reservation.ttr else _NEVER
    client.reservations[reservation.number] = reservation


async def _reserve_job(port: PortState, client: Client, number: int) -> bytes:
    """Reserve a ready, delayed or buried job by its number."""
    lease = await port.lease_named(port.numbers.id_of(number))
    if lease is None:
        return parser.NOT_FOUND
    client.works = True
    return await _taken(port, client, ReservedJob(lease, lease.open())) or parser.NOT_FOUND


def _nothing() -> None: ...


async def _settle(
    port: PortState, client: Client, number: int, outcome: Outcome, **more: Any
) -> bool:
    """Settle a reserved job; False when the client has not reserved it, or has lost it."""
    reservation = client.reservation(number)
    if reservation is None:
        return False
    del client.reservations[number]
    verdict = Verdict(
        reservation.token, outcome, started=reservation.leased, ended=clock.wall(), **more
    )
    try:
        if reservation.hands_on:
            sign_handed_on(verdict, reservation.hands_on, port.mill.runtime.keys)
        return await port.shared_owner.settle(verdict, reservation.commit)
    except BrokerUnavailable:
        client.reservations[number] = reservation  # the client may repeat the verdict
        raise
    finally:
        if reservation.commit is not None and reservation.commit.failed:
            client.hang_up()  # the job was lost with its commit


async def _delete(port: PortState, client: Client, number: int) -> bytes:
    reservation = client.reservation(number)
    tube = None if reservation is None else reservation.tube
    if reservation is None:
        tube = await port.run(_delete_unreserved, port, port.numbers.id_of(number))
    elif not reservation.ttr:  # the job was acknowledged when it was delivered
        del client.reservations[number]
    elif not await _settle(port, client, number, Outcome.SUCCESS):
        tube = None
    if tube is None:
        return parser.NOT_FOUND
    port.deleted(number, tube)
    return b"DELETED\r\n"


def _delete_unreserved(port: PortState, job_id: str) -> str | None:
    """Lease a job, so that no other client gets it, and delete it; return its tube."""
    lease = port.take_named(job_id)
    if lease is None:
        return None
    port.broker.delete([job_id])
    return lease.open().queue


async def _release(port: PortState, client: Client, number: int, rank: int, delay: int) -> bytes:
    if not await _settle(port, client, number, Outcome.RELEASE, rank=rank, delay=float(delay)):
        return parser.NOT_FOUND
    port.counters_of(number).releases += 1
    port.counters_of(number).delay = delay
    return b"RELEASED\r\n"


async def _bury(port: PortState, client: Client, number: int, rank: int) -> bytes:
    if not await _settle(port, client, number, Outcome.FAIL, rank=rank, error="buried"):
        return parser.NOT_FOUND
    port.counters_of(number).buries += 1
    return b"BURIED\r\n"


async def _touch(port: PortState, client: Client, number: int) -> bytes:
    reservation = client.reservation(number)
    if reservation is None or not reservation.ttr:
        return parser.NOT_FOUND
    if not await port.shared_owner.touch(reservation.token, commit=reservation.commit):
        return parser.NOT_FOUND
    _begin_ttr(client, reservation)
    return b"TOUCHED\r\n"


async def _kick(port: PortState, client: Client, count: int) -> bytes:
    kicked = await port.run(_kick_first, port, client.use.name, count)
    for job_id in kicked:
        port.counters_of(await port.numbers.of(job_id)).kicks += 1
    return b"KICKED %d\r\n" % len(kicked)


def _kick_first(port: PortState, tube: str, count: int) -> list[str]:
    """Kick buried jobs, or delayed jobs if no job is buried."""
    port.come_due()
    kicked: list[str] = []
    for state in (State.FAILED, State.SCHEDULED):
        while len(kicked) < count:
            few = min(count - len(kicked), KICKED_AT_ONCE)
            ids = [record.envelope.id for record in port.store_numbers.head(tube, state, few)]
            done = [i for i, ok in zip(ids, port.broker.retry(ids), strict=True) if ok]
            kicked += done
            if not done:
                break
        if kicked:
            break
    return kicked


async def _kick_job(port: PortState, client: Client, number: int) -> bytes:
    done = await port.run(_kick_one, port, port.numbers.id_of(number))
    if not done:
        return parser.NOT_FOUND
    port.counters_of(number).kicks += 1
    return parser.KICKED


def _kick_one(port: PortState, job_id: str) -> bool:
    port.come_due()
    record = port.broker.get(job_id)
    if record is None or record.state not in (State.FAILED, State.SCHEDULED):
        return False
    return port.broker.retry([job_id])[0]


async def _peek(port: PortState, client: Client, number: int) -> bytes:
    record = await port.run(stats.record_of, port, number)
    return await _found(port, [record] if record else [])


async def _peek_first(state: State, port: PortState, client: Client) -> bytes:
    return await _found(port, await port.run(_first, port, client.use.name, state))


def _first(port: PortState, tube: str, state: State) -> Sequence[Record]:
    port.come_due()
    first = port.store_numbers.head(tube, state, 1)
    found = [port.broker.get(record.envelope.id) for record in first]
    return [record for record in found if record is not None]


async def _found(port: PortState, records: Sequence[Record]) -> bytes:
    for record in records:
        body = body_of(port.mill, record.envelope)
        return parser.job_reply(b"FOUND", await port.numbers.of(record.envelope.id), body)
    return parser.NOT_FOUND


def _use(port: PortState, client: Client, name: str) -> bytes:
    client.use_tube(name)
    return _used(port, client)


def _used(port: PortState, client: Client) -> bytes:
    return b"USING %b\r\n" % client.use.name.encode()


def _watch(port: PortState, client: Client, name: str) -> bytes:
    if len(client.watch) >= WATCHED_MOST and name not in client.watch:
        return parser.OUT_OF_MEMORY
    client.watch_tube(name)
    return b"WATCHING %d\r\n" % len(client.watch)


def _ignore(port: PortState, client: Client, name: str) -> bytes:
    if not client.ignore_tube(name):
        return b"NOT_IGNORED\r\n"
    return b"WATCHING %d\r\n" % len(client.watch)


async def _pause(port: PortState, client: Client, name: str, seconds: int) -> bytes:
    if not port.tubes.is_in_use(name) and not await port.run(stats.has_jobs, port, name):
        return parser.NOT_FOUND
    port.pause(name, seconds)
    return b"PAUSED\r\n"


_HANDLERS: dict[str, Callable[..., Answer]] = {
    "reserve": reserve,
    "reserve-with-timeout": reserve,
    "reserve-job": _reserve_job,
    "delete": _delete,
    "release": _release,
    "bury": _bury,
    "touch": _touch,
    "kick": _kick,
    "kick-job": _kick_job,
    "peek": _peek,
    "peek-ready": functools.partial(_peek_first, State.READY),
    "peek-delayed": functools.partial(_peek_first, State.SCHEDULED),
    "peek-buried": functools.partial(_peek_first, State.FAILED),
    "use": _use,
    "watch": _watch,
    "ignore": _ignore,
    "pause-tube": _pause,
    "list-tube-used": _used,
    "list-tubes": stats.list_tubes,
    "list-tubes-watched": stats.list_watched,
    "stats": stats.server_stats,
    "stats-job": stats.job_stats,
    "stats-tube": stats.tube_stats,
}
