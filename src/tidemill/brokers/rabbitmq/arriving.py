"""Jobs that come from a store (``tidemill move``), and how far that went.

The mark of a departure has a place with one message: the cursor of the last page. It is published
when the page is confirmed, and forgotten with its place after 30 days.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pika

from tidemill.brokers.rabbitmq.message import Carried, Writer
from tidemill.brokers.rabbitmq.names import Place
from tidemill.brokers.rabbitmq.publisher import Outgoing
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.brokers.rabbitmq.visit import visit
from tidemill.clock import wall_time
from tidemill.job import Record, encode_envelope

__all__ = ["arrivals", "cursor_message", "read_cursor"]

_KEPT = 30 * 86400.0


def arrivals(writer: Writer, records: Sequence[Record]) -> list[Outgoing]:
    """Messages for jobs as they stood in their store."""
    now, items = wall_time(), list[Outgoing]()
    for record in records:
        envelope = msgspec.structs.replace(record.envelope, rank=record.rank)
        policy = envelope.retries.max_attempts
        fresh = record.max_attempts - policy if policy else 0  # those a kick gave it
        error = record.error or (record.attempts[-1].error if record.attempts else "")
        attempt = max(0, record.attempt - max(0, fresh))
        job = Carried(envelope, encode_envelope(envelope), attempt, error)
        items.append(writer.write(job, record.due - now if record.due else 0.0))
    return items


def cursor_message(prefix: str, mark: str, cursor: str) -> Outgoing:
    """The message that says how far a departure has come."""
    home = _place(prefix, mark)
    properties = pika.BasicProperties(delivery_mode=2, message_id=mark)
    return Outgoing("", home.name, properties, cursor.encode(), home)


def read_cursor(settings: Settings, mark: str) -> str:
    """How far a departure has come; empty when nothing of it has arrived."""
    with visit(settings) as server:
        found = server.take(_place(settings.prefix, mark), 1)
    return found[0][2].decode() if found else ""


def _place(prefix: str, mark: str) -> Place:
    arguments = {
        "x-queue-type": "quorum",
        "x-max-length": 1,  # the oldest goes
        "x-expires": int(_KEPT * 1000),
    }
    return Place(f"{prefix}.moved.{mark}", arguments)
