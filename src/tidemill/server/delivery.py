"""Decode reserved jobs, and deliver reserved messages to their client.

A message with ttr=0 is delivered at most once. The server leases the message, and stores its
acknowledgement before the first byte of the answer is written:

    leased ──► acknowledged ──► written
       │            └── the client has left: put again, behind all ready jobs of its priority
       └── the client has left: released to its place

The caller must not yield to the event loop between the return of :func:`deliver` and the write of
the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.brokers.contract.broker import Broker
from tidemill.client.messages import fresh_copy
from tidemill.core.clock import clock
from tidemill.core.codec import unpack, unpack_pickle
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Verdict
from tidemill.core.signatures import trusted
from tidemill.errors import CodecError, TidemillError
from tidemill.server.shared_owner import SharedOwner
from tidemill.server.waiters import ReservedJob

log = logging.getLogger("tidemill.server")


def value_in(envelope: Envelope, keys: Sequence[bytes]) -> Any:
    """The body of a message, or the arguments of a call as a list of positional and named ones."""
    trusted(envelope, keys)
    value = unpack_pickle(envelope.body) if envelope.pickled else unpack(envelope.body)
    if envelope.is_message:
        return value
    if not (isinstance(value, (list, tuple)) and len(value) == 2):
        raise CodecError("the arguments of the call cannot be read")
    return list(value)


async def deliver(
    shared_owner: SharedOwner, jobs: Sequence[ReservedJob], has_left: Callable[[], bool]
) -> Sequence[ReservedJob]:
    """The jobs to write to their client now; none when the client has left."""
    once = [job for job in jobs if job.envelope.at_most_once]
    others = [job for job in jobs if not job.envelope.at_most_once]
    if has_left():
        shared_owner.give_all_back(jobs)
        return []
    if not once:
        return jobs
    storing = asyncio.ensure_future(_acknowledge(shared_owner, once))
    try:
        delivered = await asyncio.shield(storing)
    except BaseException as error:
        shared_owner.give_all_back(others)
        if isinstance(error, asyncio.CancelledError):
            storing.add_done_callback(lambda _: _put_back_when_stored(shared_owner, storing))
        else:  # the acknowledgement may not be stored, so give back messages that are still leased
            shared_owner.give_all_back(once)
        raise
    if has_left():
        shared_owner.give_all_back(others)
        _put_back(shared_owner, delivered)
        return []
    lost = {id(job) for job in once} - {id(job) for job in delivered}
    return [job for job in jobs if id(job) not in lost]


async def _acknowledge(shared_owner: SharedOwner, jobs: Sequence[ReservedJob]) -> list[ReservedJob]:
    """Acknowledge jobs; return the jobs whose leases were still valid."""
    verdicts = [Verdict(job.lease.token, Outcome.SUCCESS, ended=clock.wall()) for job in jobs]
    done = await asyncio.gather(*[shared_owner.settle(verdict) for verdict in verdicts])
    return [job for job, settled in zip(jobs, done, strict=True) if settled]


def _put_back_when_stored(
    shared_owner: SharedOwner, storing: asyncio.Future[list[ReservedJob]]
) -> None:
    if not storing.cancelled() and storing.exception() is None:
        _put_back(shared_owner, storing.result())


def _put_back(shared_owner: SharedOwner, jobs: Sequence[ReservedJob]) -> None:
    """Put again the messages that were acknowledged for a client that has left."""
    for job in jobs:
        message = fresh_copy(job.envelope, job.lease)
        shared_owner.in_background(_put_again, shared_owner.broker, message)


def _put_again(broker: Broker, envelope: Envelope) -> None:
    try:
        broker.put([envelope])
    except TidemillError as error:
        log.error(
            "message %s (ttr=0) of queue %s is lost: its client left during the delivery, "
            "and the message could not be put back: %s",
            envelope.id,
            envelope.queue,
            error,
        )
