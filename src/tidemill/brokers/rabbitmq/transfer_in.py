"""Adopt jobs that come from a store (``tidemill move``), and record the progress of the move.

Each move (``Departure``) has a place named by its mark, with one message: the cursor of the last
page. The cursor is published after the page is confirmed. The cursor stays for ever. Without it, a
repeated move would begin again and store all jobs twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pika

from tidemill.brokers.rabbitmq.amqp.frames import encoded
from tidemill.brokers.rabbitmq.amqp.publish_windows import Outgoing
from tidemill.brokers.rabbitmq.amqp.short_connection import short_connection
from tidemill.brokers.rabbitmq.layout import NEVER, Place
from tidemill.brokers.rabbitmq.message import Carried, Writer
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.core.clock import clock
from tidemill.core.envelope import encode_envelope
from tidemill.core.job import Record, State


def arrivals(writer: Writer, records: Sequence[Record]) -> list[Outgoing]:
    """Messages for jobs, in the state that they had in their store."""
    now, items = clock.wall(), list[Outgoing]()
    for record in records:
        job = _carried(record)
        if record.state is State.FAILED:
            items.append(writer.write_failed(job, record.error, record.finished))
        else:
            items.append(writer.write(job, record.due - now if record.due else 0.0, now))
    return items


def _carried(record: Record) -> Carried:
    e = record.envelope
    expires = max(record.expires - e.created, 0.001) if record.expires else 0.0
    if record.state is State.FAILED:
        expires = e.expires  # a failed job no longer expires
    envelope = msgspec.structs.replace(e, rank=record.rank, expires=expires)
    policy = e.retries.max_attempts
    fresh = record.max_attempts - policy if policy else 0  # further attempts that a kick has given
    error = record.error or (record.attempts[-1].error if record.attempts else "")
    attempt = max(0, record.attempt - max(0, fresh))
    losses = 0 if e.is_message else record.losses  # messages never run alone
    return Carried(envelope, encode_envelope(envelope), attempt, error, losses=losses)


def cursor_message(prefix: str, mark: str, cursor: str) -> Outgoing:
    """The message that records the progress of a departure."""
    home = _place(prefix, mark)
    properties = encoded(pika.BasicProperties(delivery_mode=2, message_id=mark))
    return Outgoing("", home.name, properties, cursor.encode(), home)


def read_cursor(settings: Settings, mark: str) -> str:
    """The progress of a departure; empty when no page has arrived."""
    with short_connection(settings) as server:
        found = server.take(_place(settings.prefix, mark), 1)
    return found[0].body.decode() if found else ""


def _place(prefix: str, mark: str) -> Place:
    arguments = {
        "x-queue-type": "quorum",
        "x-max-length": 1,  # a new cursor replaces the old one
        "x-delivery-limit": NEVER,  # each look at the cursor counts as a delivery
    }
    return Place(f"{prefix}.moved.{mark}", arguments)
