"""Hand messages over to the client that asked for them.

A message with ttr=0 is delivered at most once. The server leases the message, and stores its
acknowledgement before the first byte of the answer is written:

    leased ──► acknowledged ──► written
       │            └── the client has left: put once more, at the end of its priority
       └── the client has left: released to its place

Nothing else may happen between the return of :func:`deliver` and the write of the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from tidemill.brokers.base import Broker
from tidemill.clock import wall_time
from tidemill.errors import TidemillError
from tidemill.job import Envelope, Outcome, Verdict
from tidemill.server.asks import Held
from tidemill.server.desk import Desk
from tidemill.undelivered import as_new

__all__ = ["deliver"]

log = logging.getLogger("tidemill.server")


async def deliver(desk: Desk, jobs: Sequence[Held], has_left: Callable[[], bool]) -> Sequence[Held]:
    """The jobs to show to their client now; none when the client has left.

    Raises:
        BrokerUnavailable: an acknowledgement may not have been stored.
    """
    once = [held for held in jobs if held.envelope.at_most_once]
    others = [held for held in jobs if not held.envelope.at_most_once]
    if has_left():
        desk.give_all_back(jobs)
        return []
    if not once:
        return jobs
    storing = asyncio.ensure_future(_acknowledge(desk, once))
    try:
        delivered = await asyncio.shield(storing)
    except BaseException as error:
        desk.give_all_back(others)
        if isinstance(error, asyncio.CancelledError):
            storing.add_done_callback(lambda _: _take_back(desk, storing))
        else:  # nobody knows whether that was stored; a message that still is leased goes back
            desk.give_all_back(once)
        raise
    if has_left():
        desk.give_all_back(others)
        restore(desk, delivered)
        return []
    lost = {id(held) for held in once} - {id(held) for held in delivered}
    return [held for held in jobs if id(held) not in lost]


async def _acknowledge(desk: Desk, jobs: Sequence[Held]) -> list[Held]:
    """The jobs whose leases still stood."""
    verdicts = [Verdict(h.lease.token, Outcome.SUCCESS, ended=wall_time()) for h in jobs]
    done = await asyncio.gather(*[desk.settle(verdict) for verdict in verdicts])
    return [held for held, settled in zip(jobs, done, strict=True) if settled]


def _take_back(desk: Desk, storing: asyncio.Future[list[Held]]) -> None:
    if not storing.cancelled() and storing.exception() is None:
        restore(desk, storing.result())


def restore(desk: Desk, jobs: Sequence[Held]) -> None:
    """Put messages once more that were acknowledged for a client that has left."""
    for held in jobs:
        desk.in_background(_put_again, desk.broker, as_new(held.envelope, held.lease))


def _put_again(broker: Broker, envelope: Envelope) -> None:
    try:
        broker.put([envelope])
    except TidemillError as error:
        log.error(
            "message %s (ttr=0) of queue %s is lost: its client left while it was delivered, "
            "and it could not be put back: %s",
            *(envelope.id, envelope.queue, error),
        )
