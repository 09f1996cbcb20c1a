"""A job as the server carries it.

The body is the envelope, in the form of every broker. Headers hold the facts that change from run
to run. A new job without a delay has no headers.

    attempt   runs so far
    error     the error of the last run
    home      the place of the job when it is due (:mod:`.timekeeper`)
    due       wall time in ms at which its wait ends
    rest      ms that remain beyond the longest delay of a timer queue
    losses    for a suspect: 1 + the deaths of its workers since the job runs alone
    handed    how often the job may have killed its worker before this message was written
"""

from __future__ import annotations

import itertools
import logging
import math
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import pika

from tidemill.brokers.rabbitmq.amqp.connection import Properties, decoded, encoded
from tidemill.brokers.rabbitmq.layout import HOME, LONGEST, Names, Place, level_of, server_priority
from tidemill.brokers.rabbitmq.put import Outgoing
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope, decode_envelope, encode_envelope

log = logging.getLogger("tidemill.rabbitmq")

_ERROR_MOST = 2000

_TASK_MOST = 60  # characters of a task's name that people see; the server has room for 255 bytes


class Carried(msgspec.Struct):
    """A job from a message or for a message, with the history of its runs."""

    # ``deliveries`` counts how often the server handed out the message before. ``run`` identifies
    # the message: the server's copies of one message are one run of the job.

    envelope: Envelope
    encoded: bytes
    attempt: int = 0
    error: str = ""
    rest: float = 0.0
    losses: int = 0
    handed: int = 0
    deliveries: int = 0
    run: str = ""


class Writer:
    """Makes messages from jobs. Each message has a unique number."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._mark = uuid.uuid4().hex[:16]
        self._numbers = itertools.count()

    @property
    def failed(self) -> Place:
        return self._names.failed

    def write(self, job: Carried, delay: float = 0.0, now: float = 0.0) -> Outgoing:
        """The message of a job that becomes ready ``delay`` seconds after ``now``, in wall time."""
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
        if job.handed:
            headers["handed"] = job.handed
        if delay <= 0:
            return Outgoing(self._properties(job, headers), job.encoded, home)
        headers["due"] = math.ceil(((now or clock.wall()) + delay) * 1000)
        if delay > LONGEST:
            headers["rest"] = round((delay - LONGEST) * 1000)
        headers[HOME], home = home.name, self._names.timer(level_of(delay))
        return Outgoing(self._properties(job, headers), job.encoded, home)

    def write_new(self, job: Envelope, delay: float, now: float = 0.0) -> Outgoing:
        return self.write(Carried(job, encode_envelope(job)), delay, now)

    def write_failed(self, job: Carried, reason: str) -> Outgoing:
        """The message of a job that failed just now, with the reason."""
        home: Place = self._names.failed
        headers = {
            "attempt": job.attempt,
            "error": reason[:_ERROR_MOST],
            "queue": job.envelope.queue,
        }
        properties = self._properties(job, headers, round(clock.wall()))
        return Outgoing(properties, job.encoded, home)

    def notice(self, place: Place) -> Outgoing:
        """The message that tells workers of a timer queue."""
        level = place.name.rpartition(".")[2]
        properties = encoded(pika.BasicProperties(delivery_mode=2, message_id=f"timer {level}"))
        return Outgoing(properties, level.encode(), self._names.timers_in_use)

    def write_unreadable(
        self, place: Place, properties: pika.BasicProperties, body: bytes, why: str
    ) -> Outgoing:
        """A copy of an unreadable message, which the failed jobs keep unchanged for a human."""
        log.error("a message in %s goes to the failed jobs: %s", place.name, why)
        ours = {"error": why[:_ERROR_MOST], "queue": place.queue, "place": place.name}
        return self._copy(properties, body, ours, self._names.failed)

    def write_again(self, properties: pika.BasicProperties, body: bytes) -> Outgoing | None:
        """A copy of a message for its place of origin; None when this place is unknown."""
        place = self.origin(cast("dict[str, Any]", properties.headers or {}))
        return None if place is None else self._copy(properties, body, {}, place)

    def origin(self, headers: Mapping[str, Any]) -> Place | None:
        """The place from which a failed message came, if its headers name that place."""
        death = death_of(headers)
        return self._names.named(death.place if death else str(headers.get("place") or ""))

    def _copy(
        self, source: pika.BasicProperties, body: bytes, ours: dict[str, Any], home: Place
    ) -> Outgoing:
        headers = {**without_traces(source.headers or {}), **ours}
        for name in ("CC", "BCC"):  # addresses of further queues, which already have the message
            headers.pop(name, None)
        properties = pika.BasicProperties(
            content_type=source.content_type,
            content_encoding=source.content_encoding,
            headers=headers or None,
            delivery_mode=2,
            priority=source.priority,
            correlation_id=source.correlation_id,
            message_id=source.message_id,
            timestamp=round(clock.wall()),
            type=source.type,
        )
        return Outgoing(encoded(properties), body, home)

    def _properties(self, job: Carried, headers: dict[str, Any], when: int = 0) -> bytes:
        envelope, classic = job.envelope, self._names.classic
        task, run = envelope.task[:_TASK_MOST], f"{self._mark}{next(self._numbers):x}"
        if not (headers or when or classic) and task:
            return plain_properties(run, envelope.id, task)
        properties = pika.BasicProperties(
            content_type=CONTENT_TYPE,
            headers=headers or None,
            delivery_mode=2,
            priority=server_priority(envelope.rank) if classic else None,
            message_id=envelope.id,
            correlation_id=run,
            timestamp=when or None,
            type=task or None,
        )
        return encoded(properties)


def read(properties: Properties, body: bytes, *, redelivered: bool) -> Carried:
    envelope = decode_envelope(body)
    if isinstance(properties, bytes):
        run = plain_run(properties)
        if run:
            return Carried(envelope, body, deliveries=int(redelivered), run=run)
        properties = decoded(properties)
    headers = cast("dict[str, Any]", properties.headers or {})
    return Carried(
        envelope,
        body,
        int(headers.get("attempt") or 0),
        str(headers.get("error") or ""),
        float(headers.get("rest") or 0) / 1000,
        int(headers.get("losses") or 0),
        int(headers.get("handed") or 0),
        int(headers.get("x-delivery-count") or redelivered),
        properties.correlation_id or f"{envelope.id} {headers.get('attempt')}",
    )


# -- properties of new jobs, which all have the same form, as bytes in the order of their flags ----

CONTENT_TYPE = "application/vnd.tidemill.job+msgpack"

_HAS_TYPE, _HAS_MODE, _HAS_RUN, _HAS_ID, _HAS_TASK = (1 << bit for bit in (15, 12, 10, 7, 5))
_FLAGS = _HAS_TYPE | _HAS_MODE | _HAS_RUN | _HAS_ID | _HAS_TASK
_KEPT = b"\x02"

_START = (
    _FLAGS.to_bytes(2, "big") + len(CONTENT_TYPE).to_bytes(1, "big") + CONTENT_TYPE.encode() + _KEPT
)
_RUN = len(_START)


def plain_properties(run: str, job_id: str, task: str) -> bytes:
    """The properties of a new job. ``run`` is the unique name of its message."""
    first, second, third = run.encode(), job_id.encode(), task.encode()
    values = len(first), first, len(second), second, len(third), third
    return _START + b"%c%b%c%b%c%b" % values


def plain_run(properties: bytes) -> str:
    """The ``run`` in the properties of a new job; empty for other properties."""
    if not properties.startswith(_START):
        return ""
    return properties[_RUN + 1 : _RUN + 1 + properties[_RUN]].decode()


# -- dead letters: why the server took a message out of a queue, and out of which queue ----------

_OURS = ("error", "queue", "place")
"""Headers that tidemill adds to a message when it moves the message to the failed jobs."""

_CAUSES = {
    "delivery_limit": "the delivery-limit of a policy was reached",
    "expired": "the message-ttl of a policy was over",
    "maxlen": "a policy limits the length of the queue",
    "rejected": "another program rejected it",
}

_TRACES = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")


class Death(msgspec.Struct, frozen=True):
    """One dead-lettering."""

    place: str  # the queue of the server that had the message
    why: str  # one sentence for people
    time: float  # wall time


def death_of(headers: Mapping[str, Any]) -> Death | None:
    """The latest dead-lettering of a failed message; None if tidemill itself moved the message."""
    # The server writes the header ``x-death``, with the latest entry first.
    deaths = headers.get("x-death")
    if "queue" in headers or not isinstance(deaths, list) or not deaths:
        return None
    last = deaths[0] if isinstance(deaths[0], dict) else {}
    place, reason, when = (last.get(name) for name in ("queue", "reason", "time"))
    cause = _CAUSES.get(str(reason), str(reason))
    moment = when.replace(tzinfo=UTC).timestamp() if isinstance(when, datetime) else 0.0
    return Death(str(place or ""), f"rabbitmq took it out of {place}: {cause}", moment)


def without_traces(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers that the message had when it was first published."""
    return {
        name: value
        for name, value in headers.items()
        if name not in _OURS and not name.startswith(_TRACES)
    }
