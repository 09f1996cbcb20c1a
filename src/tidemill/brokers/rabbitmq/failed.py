"""What failed: looked at, tried again, deleted.

It all lies in one place. A look takes messages and gives them back in their order; to find some by
their ids means to go through the others before them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import pika

from tidemill.brokers.base import Filter, Page, matches
from tidemill.brokers.rabbitmq.message import Carried, Writer, read
from tidemill.brokers.rabbitmq.publisher import Outgoing
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.brokers.rabbitmq.visit import TAKE_MOST, visit
from tidemill.crash import point
from tidemill.errors import BrokerUnavailable
from tidemill.job import Envelope, Record, State, encode_envelope

__all__ = ["SHOWN_MOST", "Failed"]

SHOWN_MOST = 10_000
"""Jobs that a look shows: those that failed first."""

_Sent = Callable[[Sequence[Outgoing]], None]


class Failed:
    """The place of the failed. ``publish`` returns when the server has what it was given."""

    def __init__(self, settings: Settings, writer: Writer, publish: _Sent) -> None:
        self._settings = settings
        self._writer = writer
        self._publish = publish
        self._shown: list[Record] = []

    def find(self, what: Filter, limit: int, cursor: str) -> Page:
        """Those that match, the latest first. Later pages are of the look the first one took."""
        if not cursor or not self._shown:
            try:
                self._shown = self._look()
            except BrokerUnavailable:  # who asks a queue that is just being made is cut off
                self._shown = self._look()
        start = int(cursor or 0)
        records: list[Record] = []
        for index in range(start, len(self._shown)):
            if matches(self._shown[index], what):
                records.append(self._shown[index])
                if len(records) == limit:
                    return Page(records, str(index + 1) if index + 1 < len(self._shown) else "")
        return Page(records)

    def _look(self) -> list[Record]:
        with visit(self._settings) as server:
            taken = server.take(self._writer.failed, SHOWN_MOST)
        return [_record(properties, body) for _, properties, body in reversed(taken)]

    def kick(self, ids: Iterable[str]) -> list[bool]:
        """Make them ready, with fresh attempts and no end. Killed meanwhile, some run twice."""
        return self._each(ids, self._again)

    def delete(self, ids: Iterable[str]) -> list[bool]:
        """Forget them."""
        return self._each(ids, lambda properties, body: [])

    def _each(
        self,
        ids: Iterable[str],
        instead: Callable[[pika.BasicProperties, bytes], list[Outgoing] | None],
    ) -> list[bool]:
        """Put something in the place of some, and acknowledge them when the server has it."""
        wanted, begun = list(ids), list[bool]()
        try:
            return self._each_once(wanted, instead, begun)
        except BrokerUnavailable:  # as above; but what was begun is not done twice
            if begun:
                raise
            return self._each_once(wanted, instead, begun)

    def _each_once(
        self,
        wanted: Sequence[str],
        instead: Callable[[pika.BasicProperties, bytes], list[Outgoing] | None],
        begun: list[bool],
    ) -> list[bool]:
        left, done, tags, items = set(wanted), set[str](), list[int](), list[Outgoing]()
        with visit(self._settings) as server:
            taken = server.take(self._writer.failed, TAKE_MOST)
            begun.append(True)
            for tag, properties, body in taken:
                job_id = _record(properties, body).envelope.id
                made = instead(properties, body) if job_id in left else None
                if made is not None:
                    left.discard(job_id)
                    done.add(job_id)
                    tags.append(tag)
                    items += made
            if items:
                self._publish(items)
            point("failed.published")
            for tag in tags:
                server.channel.basic_ack(tag)
        self._shown = []
        return [job_id in done for job_id in wanted]

    def _again(self, properties: pika.BasicProperties, body: bytes) -> list[Outgoing] | None:
        try:
            job = read(properties, body, redelivered=False)
        except (msgspec.DecodeError, ValueError):
            return None  # it never was a job
        envelope = msgspec.structs.replace(job.envelope, expires=0.0, delay=0.0, at=0.0)
        return [self._writer.write(Carried(envelope, encode_envelope(envelope)))]


def _record(properties: pika.BasicProperties, body: bytes) -> Record:
    """A message as the record of what failed; what cannot be read gets an id all the same."""
    headers = cast("dict[str, Any]", properties.headers or {})
    try:
        envelope = read(properties, body, redelivered=False).envelope
    except (msgspec.DecodeError, ValueError):
        job_id = properties.message_id or hashlib.sha1(body).hexdigest()[:20]
        envelope = Envelope(id=job_id, queue=str(headers.get("queue") or "?"))
    return Record(
        envelope=msgspec.structs.replace(envelope, body=b""),
        state=State.FAILED,
        seq=0,
        rank=envelope.rank,
        max_attempts=envelope.retries.max_attempts,
        attempt=int(headers.get("attempt") or 0),
        finished=float(properties.timestamp or 0),
        error=str(headers.get("error") or ""),
    )
