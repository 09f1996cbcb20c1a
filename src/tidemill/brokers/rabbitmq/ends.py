"""How messages end: acknowledged, given back, put aside, or followed by others first.

An acknowledgement goes out when the server has confirmed what takes the message's place, so that a
kill in between leaves both: at worst a repeat. The ends of the last runs are remembered, for the
server hands out anew what was not acknowledged when a line broke.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pika

from tidemill.brokers.rabbitmq.ending import after, goes_back
from tidemill.brokers.rabbitmq.message import Writer
from tidemill.brokers.rabbitmq.message import read as read_message
from tidemill.brokers.rabbitmq.publisher import Outgoing, Publisher
from tidemill.brokers.rabbitmq.shelf import Hold, Shelf
from tidemill.brokers.rabbitmq.tap import Tap
from tidemill.clock import wall_time
from tidemill.job import Outcome, Verdict

__all__ = ["Ends"]

log = logging.getLogger("tidemill.rabbitmq")

POISON = 20
"""So many times a task may be handed out without ever ending, before it is held to be why."""

_MANY_RETURNS = 10
"""The server counts what goes back as it counts deaths: from here on we write a new message."""

_REMEMBERED = 20_000
"""Runs whose end is remembered."""

_DONE = Verdict(0, Outcome.SUCCESS)


class Ends:
    """The ends of one owner's messages. ``held`` are its leases, and ``lock`` the owner's."""

    def __init__(
        self,
        tap: Tap,
        publisher: Publisher,
        writer: Writer,
        held: Mapping[int, Hold],
        lock: threading.RLock,
    ) -> None:
        self._tap = tap
        self._publisher = publisher
        self._writer = writer
        self._held = held
        self._lock = lock
        self._ended: OrderedDict[tuple[str, int], Verdict] = OrderedDict()  # by run

    # -- leaving --------------------------------------------------------------------------------

    def close(self, hold: Hold, verdict: Verdict) -> None:
        """What becomes of a message, by the verdict on its job."""
        if goes_back(verdict, changed=hold.changed):
            self.give_back(hold)
            return
        hold.job, items = after(hold.job, verdict, self._writer)
        self.finish(hold, items)

    def finish(self, hold: Hold, items: Sequence[Outgoing] = ()) -> None:
        """Acknowledge, when the server has what takes the message's place."""
        tag, era, hold.tag = hold.tag, hold.era, 0
        if not items or hold.job.attempt != hold.run[1]:  # else what follows is the same run
            self.remember(hold, _DONE)
        if not items:
            self._tap.ack(tag, era)
            return

        def sent(trouble: str) -> None:
            if trouble:
                log.error("what becomes of job %s cannot be stored: %s", hold.run[0], trouble)
                self._tap.nack(tag, era)
            else:
                self._tap.ack(tag, era)

        self._publisher.send(items, sent)

    def remember(self, hold: Hold, verdict: Verdict) -> None:
        """How a run ended, for when the server hands its message out once more."""
        self._ended[hold.run] = verdict
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def give_back(self, hold: Hold) -> None:
        """The server hands it to somebody else; no attempt is counted."""
        if not hold.tag:
            return
        if hold.job.deliveries >= _MANY_RETURNS:
            self.finish(hold, [self._writer.write(hold.job)])
            return
        tag, hold.tag = hold.tag, 0
        self._tap.nack(tag, hold.era)

    # -- coming ---------------------------------------------------------------------------------

    def read(
        self, shelf: Shelf, tag: int, redelivered: bool, properties: Any, body: bytes
    ) -> Hold | bool:
        """A message, unless it is settled by looking at it."""
        try:
            job = read_message(properties, body, redelivered=redelivered)
        except (msgspec.DecodeError, ValueError) as error:
            self._put_aside(shelf, tag, properties, body, f"it cannot be read: {error}")
            return False
        with self._lock:
            hold = Hold(job, tag, self._tap.era, shelf)
            if not redelivered:
                self._ended.pop(hold.run, None)  # somebody put that run back
            elif self._is_known(hold):
                return False
            if self._is_over(hold):
                return False
        return hold

    def _is_known(self, hold: Hold) -> bool:
        """A message we had before the line broke: its job still runs here, or ended here."""
        ended = self._ended.get(hold.run)
        if ended is _DONE:
            self.finish(hold)
        elif ended is not None:
            del self._ended[hold.run]
            self.close(hold, ended)
        else:
            held = [h for h in self._held.values() if not h.tag and h.run == hold.run]
            for old in held:
                old.tag, old.era = hold.tag, hold.era
            return bool(held)
        return True

    def _is_over(self, hold: Hold) -> bool:
        """A message that is not to be run: not yet, or not any more."""
        job, envelope = hold.job, hold.job.envelope
        if job.rest > 0:
            later = msgspec.structs.replace(job, rest=0.0)
            self.finish(hold, [self._writer.write(later, job.rest)])
        elif envelope.expires and envelope.created + envelope.expires <= wall_time():
            log.info("job %s was not started before it expired", envelope.id)
            self.finish(hold)
        elif job.deliveries >= POISON and envelope.retries.max_attempts:
            reason = f"handed out {job.deliveries} times, and nobody who had it lived to end it"
            self.finish(hold, [self._writer.write_failed(job, reason)])
        else:
            return False
        return True

    def _put_aside(self, shelf: Shelf, tag: int, properties: Any, body: bytes, why: str) -> None:
        """What is no job of ours is kept with what failed."""
        log.error("a message in %s is put aside: %s", shelf.place.name, why)
        home, era = self._writer.failed, self._tap.era
        kept = pika.BasicProperties(
            headers={"error": why, "queue": shelf.place.queue},
            delivery_mode=2,
            message_id=properties.message_id,
        )
        self._publisher.send(
            [Outgoing("", home.name, kept, body, home)],
            lambda trouble: None if trouble else self._tap.ack(tag, era),
        )
