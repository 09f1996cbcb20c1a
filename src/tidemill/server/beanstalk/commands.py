"""What each command does, but for those that take jobs (:mod:`.taking`).

A command answers at once, or with something to await. Whatever a client is told has been stored.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tidemill.clock import wall_time
from tidemill.errors import BrokerUnavailable, DuplicateJob
from tidemill.job import Outcome, Record, State, Verdict
from tidemill.server.beanstalk import stats, taking
from tidemill.server.beanstalk.backing import Backing
from tidemill.server.beanstalk.bodies import envelope_of, shown
from tidemill.server.beanstalk.client import Client
from tidemill.server.beanstalk.numbers import id_of
from tidemill.server.beanstalk.reading import Command, Given
from tidemill.server.beanstalk.replies import (
    BURIED,
    DELETED,
    DRAINING,
    KICKED,
    NOT_FOUND,
    NOT_IGNORED,
    OUT_OF_MEMORY,
    PAUSED,
    RELEASED,
    TOUCHED,
    job_reply,
)

__all__ = ["Answer", "answer"]

WATCHED_MOST = 1000
"""Tubes that one client may watch."""

KICKED_AT_ONCE = 1000

Answer = bytes | Coroutine[Any, Any, bytes]


def answer(backing: Backing, client: Client, command: Command) -> Answer:
    """Do what a client asks for."""
    if command.job is not None:
        client.produces = True
        return _put(backing, client.use.name, command.job)
    return _HOW[command.verb](backing, client, *command.args)


# -- putting -------------------------------------------------------------------------------------


async def _put(backing: Backing, tube: str, given: Given) -> bytes:
    if backing.draining:
        return DRAINING
    clashes = 0
    while True:
        number = await backing.numbers.draw()
        envelope = envelope_of(backing.mill, tube, given, id_of(number), tasks=backing.tasks)
        own = envelope.id == id_of(number)
        try:
            put = await backing.mill.gathered.put(envelope)
        except DuplicateJob as error:
            if not own:  # the user's id: it is there already
                return b"INSERTED %d\r\n" % await backing.numbers.of(error.job_id or envelope.id)
            clashes += 1
            await backing.numbers.skip(1 << min(clashes, 40))
            continue
        if put.id != id_of(number):
            number = await backing.numbers.of(put.id)
        return b"INSERTED %d\r\n" % number


# -- settling ------------------------------------------------------------------------------------


async def _settle(
    backing: Backing, client: Client, number: int, outcome: Outcome, **more: Any
) -> bool:
    """Say what became of a job that the client has reserved; False when it has not."""
    hold = client.hold(number)
    if hold is None:
        return False
    client.drop(hold)
    verdict = Verdict(hold.token, outcome, started=hold.leased, ended=wall_time(), **more)
    try:
        return await backing.desk.settle(verdict, hold.pledge)
    except BrokerUnavailable:
        client.keep(hold)  # nobody knows whether it was done: it may say so again
        raise
    finally:
        if hold.pledge is not None and hold.pledge.broken:
            client.hang_up()  # as who holds such a job still


async def _delete(backing: Backing, client: Client, number: int) -> bytes:
    hold = client.hold(number)
    tube = None if hold is None else hold.tube
    if hold is None:
        tube = await backing.run(_delete_unreserved, backing, backing.numbers.id_of(number))
    elif not hold.ttr:  # it was acknowledged when it was delivered
        client.drop(hold)
    elif not await _settle(backing, client, number, Outcome.SUCCESS):
        tube = None
    if tube is None:
        return NOT_FOUND
    backing.deleted(number, tube)
    return DELETED


def _delete_unreserved(backing: Backing, job_id: str) -> str | None:
    """Delete a job that nobody has; its tube. It is leased first, lest others get it meanwhile."""
    lease = backing.take_named(job_id)
    if lease is None:
        return None
    backing.broker.delete([job_id])
    return lease.open().queue


async def _release(backing: Backing, client: Client, number: int, rank: int, delay: int) -> bytes:
    if not await _settle(backing, client, number, Outcome.RELEASE, rank=rank, delay=float(delay)):
        return NOT_FOUND
    backing.tally(number).releases += 1
    backing.tally(number).delay = delay
    return RELEASED


async def _bury(backing: Backing, client: Client, number: int, rank: int) -> bytes:
    if not await _settle(backing, client, number, Outcome.FAIL, rank=rank, error="buried"):
        return NOT_FOUND
    backing.tally(number).buries += 1
    return BURIED


async def _touch(backing: Backing, client: Client, number: int) -> bytes:
    hold = client.hold(number)
    if hold is None or not hold.ttr:
        return NOT_FOUND
    if not await backing.desk.touch(hold.token, pledge=hold.pledge):
        return NOT_FOUND
    taking.begin_ttr(client, hold)
    return TOUCHED


# -- kicking -------------------------------------------------------------------------------------


async def _kick(backing: Backing, client: Client, count: int) -> bytes:
    kicked = await backing.run(_kick_first, backing, client.use.name, count)
    for job_id in kicked:
        backing.tally(await backing.numbers.of(job_id)).kicks += 1
    return b"KICKED %d\r\n" % len(kicked)


def _kick_first(backing: Backing, tube: str, count: int) -> list[str]:
    """Those that are buried, or, if there is none, those that are delayed."""
    backing.come_due()
    kicked: list[str] = []
    for state in (State.FAILED, State.SCHEDULED):
        while len(kicked) < count:
            few = min(count - len(kicked), KICKED_AT_ONCE)
            ids = [record.envelope.id for record in backing.naming.head(tube, state, few)]
            done = [i for i, ok in zip(ids, backing.broker.kick(ids), strict=True) if ok]
            kicked += done
            if not done:
                break
        if kicked:
            break
    return kicked


async def _kick_job(backing: Backing, client: Client, number: int) -> bytes:
    done = await backing.run(_kick_one, backing, backing.numbers.id_of(number))
    if not done:
        return NOT_FOUND
    backing.tally(number).kicks += 1
    return KICKED


def _kick_one(backing: Backing, job_id: str) -> bool:
    backing.come_due()
    record = backing.broker.get(job_id)
    if record is None or record.state not in (State.FAILED, State.SCHEDULED):
        return False
    return backing.broker.kick([job_id])[0]


# -- looking -------------------------------------------------------------------------------------


async def _peek(backing: Backing, client: Client, number: int) -> bytes:
    record = await backing.run(stats.record_of, backing, number)
    return await _found(backing, [record] if record else [])


def _peek_first(state: State) -> Callable[[Backing, Client], Answer]:
    async def peek(backing: Backing, client: Client) -> bytes:
        return await _found(backing, await backing.run(_first, backing, client.use.name, state))

    return peek


def _first(backing: Backing, tube: str, state: State) -> Sequence[Record]:
    backing.come_due()
    return backing.naming.head(tube, state, 1)


async def _found(backing: Backing, records: Sequence[Record]) -> bytes:
    for record in records:
        body = shown(backing.mill, record.envelope)
        return job_reply(b"FOUND", await backing.numbers.of(record.envelope.id), body)
    return NOT_FOUND


# -- tubes ---------------------------------------------------------------------------------------


def _use(backing: Backing, client: Client, name: str) -> bytes:
    client.use_tube(name)
    return _used(backing, client)


def _used(backing: Backing, client: Client) -> bytes:
    return b"USING %b\r\n" % client.use.name.encode()


def _watch(backing: Backing, client: Client, name: str) -> bytes:
    if len(client.watch) >= WATCHED_MOST and name not in client.watch:
        return OUT_OF_MEMORY
    client.watch_tube(name)
    return b"WATCHING %d\r\n" % len(client.watch)


def _ignore(backing: Backing, client: Client, name: str) -> bytes:
    if not client.ignore_tube(name):
        return NOT_IGNORED
    return b"WATCHING %d\r\n" % len(client.watch)


async def _pause(backing: Backing, client: Client, name: str, seconds: int) -> bytes:
    if not backing.tubes.is_in_use(name) and not await backing.run(stats.has_jobs, backing, name):
        return NOT_FOUND
    backing.pause(name, seconds)
    return PAUSED


_HOW: dict[str, Callable[..., Answer]] = {
    "reserve": taking.reserve,
    "reserve-with-timeout": taking.reserve,
    "reserve-job": taking.reserve_job,
    "delete": _delete,
    "release": _release,
    "bury": _bury,
    "touch": _touch,
    "kick": _kick,
    "kick-job": _kick_job,
    "peek": _peek,
    "peek-ready": _peek_first(State.READY),
    "peek-delayed": _peek_first(State.SCHEDULED),
    "peek-buried": _peek_first(State.FAILED),
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
