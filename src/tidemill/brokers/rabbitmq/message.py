"""A job as the server carries it.

The body is the envelope, as every broker has it. What changes from run to run stands in headers,
which a new job does not have: ``attempt`` (runs so far), ``error`` (how the last one ended),
``rest`` (milliseconds it is to wait beyond what the clock holds at once), ``losses`` (one more than
how often its worker died since it is held to be why, and runs alone).
"""

from __future__ import annotations

import itertools
import uuid
from typing import Any, cast

import msgspec
import pika

from tidemill.brokers.rabbitmq.delays import Clockwork, longest, split
from tidemill.brokers.rabbitmq.names import Names, Place, server_priority
from tidemill.brokers.rabbitmq.publisher import Outgoing
from tidemill.clock import wall_time
from tidemill.job import Envelope, decode_envelope, encode_envelope

__all__ = ["Carried", "Writer", "read"]

CONTENT_TYPE = "application/vnd.tidemill.job+msgpack"
_ERROR_MOST = 2000


class Carried(msgspec.Struct):
    """A job that came, or goes, with what has happened to it.

    ``deliveries`` is how often the server handed it out before, whatever came of it. ``run`` tells
    its message from every other: the server's copies of one message are one run of the job.
    """

    envelope: Envelope
    encoded: bytes
    attempt: int = 0
    error: str = ""
    rest: float = 0.0
    losses: int = 0
    deliveries: int = 0
    run: str = ""


class Writer:
    """Makes messages of jobs, each with a number that no other has."""

    def __init__(self, names: Names, clockwork: Clockwork) -> None:
        self._names = names
        self._clockwork = clockwork
        self._mark = uuid.uuid4().hex[:16]
        self._numbers = itertools.count()

    @property
    def failed(self) -> Place:
        """Where what failed is kept."""
        return self._names.failed

    def write(self, job: Carried, delay: float = 0.0) -> Outgoing:
        """A job that is to be ready after ``delay`` seconds."""
        home = self._names.home(job.envelope)
        if job.losses:
            home = self._names.suspect(job.envelope.queue)
        headers: dict[str, Any] = {}
        if job.attempt:
            headers["attempt"] = job.attempt
        if job.error:
            headers["error"] = job.error[:_ERROR_MOST]
        if job.losses:
            headers["losses"] = job.losses
        if delay <= 0:
            return Outgoing("", home.name, self._properties(job, headers), job.encoded, home)
        rest = delay - longest()
        if rest > 0:
            headers["rest"] = round(rest * 1000)
        digits = split(delay)
        exchange, key = self._clockwork.route(digits, home.name)
        return Outgoing(exchange, key, self._properties(job, headers), job.encoded, home, digits)

    def write_new(self, job: Envelope, delay: float) -> Outgoing:
        """A job that was just put."""
        return self.write(Carried(job, encode_envelope(job)), delay)

    def write_failed(self, job: Carried, reason: str) -> Outgoing:
        """A job that is kept for a human, with why."""
        home: Place = self._names.failed
        headers = {
            "attempt": job.attempt,
            "error": reason[:_ERROR_MOST],
            "queue": job.envelope.queue,
        }
        properties = self._properties(job, headers)
        properties.timestamp = round(wall_time())
        return Outgoing("", home.name, properties, job.encoded, home)

    def _properties(self, job: Carried, headers: dict[str, Any]) -> pika.BasicProperties:
        envelope = job.envelope
        return pika.BasicProperties(
            content_type=CONTENT_TYPE,
            headers=headers or None,
            delivery_mode=2,
            priority=server_priority(envelope.rank) if self._names.classic else None,
            message_id=envelope.id,
            correlation_id=f"{self._mark}{next(self._numbers):x}",
            type=envelope.task[:200] or None,
        )


def read(properties: pika.BasicProperties, body: bytes, *, redelivered: bool) -> Carried:
    """What a message says.

    Raises:
        msgspec.DecodeError: it is none of ours.
    """
    envelope = decode_envelope(body)
    headers = cast("dict[str, Any]", properties.headers or {})
    return Carried(
        envelope,
        body,
        int(headers.get("attempt") or 0),
        str(headers.get("error") or ""),
        float(headers.get("rest") or 0) / 1000,
        int(headers.get("losses") or 0),
        int(headers.get("x-delivery-count") or redelivered),
        properties.correlation_id or f"{envelope.id} {headers.get('attempt')}",
    )
