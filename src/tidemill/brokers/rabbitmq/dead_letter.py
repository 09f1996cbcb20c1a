"""Failed jobs: look at them, try them again, delete them.

All failed jobs lie in one place. A *look* reads the failed jobs: it takes the messages, and then
returns them in their order. A search for jobs by id reads all messages before these jobs.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import pika

from tidemill.brokers.contract.inspection import Filter, Page, matches, number_of
from tidemill.brokers.rabbitmq.amqp.short_connection import (
    ShortConnection,
    Unanswered,
    short_connection,
)
from tidemill.brokers.rabbitmq.message import Carried, Writer, death_of, read
from tidemill.brokers.rabbitmq.put import Outgoing
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.core.crash_points import point
from tidemill.core.envelope import Envelope, encode_envelope
from tidemill.core.job import Record, State

SHOWN_MOST = 10_000  # the most jobs that a look shows: the jobs that failed first

PIECE_COUNT, PIECE_BYTES = 1000, 16_000_000
"""The most messages, and bytes of their replacements, that one call keeps in memory."""

_LOOKS_MOST = 8  # the most looks that are kept for later pages
_FORMS_WITHIN, _ASK_AGAIN = 5.0, 0.2  # seconds until a new queue must answer; between two questions


class _Look:
    """The failed jobs that one reader pages through."""

    # Each reader has a look of its own, since messages that go back to their queue may get another
    # order.

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.gone: set[str] = set()  # ids of jobs that were retried or deleted after the look

    def place_after(self, cursor: str) -> int:
        """The position after the last job of a page, even if the look of the page is forgotten."""
        if not cursor:
            return 0
        number, _, job_id = cursor.partition(".")
        place = number_of(number)
        ids = [record.envelope.id for record in self.records]
        if job_id in ids[place - 1 : place] or job_id not in ids:
            return place
        return ids.index(job_id) + 1


class DeadLetters:
    """The place of failed jobs."""

    # ``publish`` returns when the server has the given messages, and ``make_known`` when the server
    # has the names of the queues.

    def __init__(
        self,
        settings: Settings,
        writer: Writer,
        publish: Callable[[Sequence[Outgoing]], None],
        make_known: Callable[[Iterable[str]], None],
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._publish = publish
        self._make_known = make_known
        self._looks: dict[str, _Look] = {}

    def find(self, what: Filter, limit: int, cursor: str) -> Page:
        """The matching jobs, the latest first. Later pages use the look of the first page."""
        name, _, rest = cursor.partition(".")
        look = self._looks.get(name)
        if look is None:
            look = _Look(self._look())
            name = self._keep(look)
        records: list[Record] = []
        for index in range(look.place_after(rest), len(look.records)):
            record = look.records[index]
            if record.envelope.id not in look.gone and matches(record, what):
                records.append(record)
                if len(records) == limit:
                    if index + 1 == len(look.records):
                        break
                    return Page(records, f"{name}.{index + 1}.{record.envelope.id}")
        return Page(records)

    def _keep(self, look: _Look) -> str:
        """Keep a look for its later pages, in place of the oldest look. Return its name."""
        name = secrets.token_hex(4)
        self._looks[name] = look
        for oldest in list(self._looks)[:-_LOOKS_MOST]:
            self._looks.pop(oldest, None)
        return name

    def _look(self) -> list[Record]:
        """All failed jobs. RabbitMQ cuts the connection while a queue is being made: ask again."""
        end = time.monotonic() + _FORMS_WITHIN
        while True:
            try:
                with short_connection(self._settings) as server:
                    seen = server.walk(self._writer.failed, SHOWN_MOST)
                    found = [_record(self._writer, about, body) for _, about, body in seen]
                return [record.for_list() for record in reversed(found)]
            except Unanswered:
                if time.monotonic() > end:
                    raise
                time.sleep(_ASK_AGAIN)

    def retry(self, ids: Iterable[str]) -> list[bool]:
        """Make jobs ready, with fresh attempts and without expiry."""
        # After a kill, some jobs run twice. An unreadable message goes back unchanged to its place
        # of origin.
        return self._each(ids, self._again)

    def delete(self, ids: Iterable[str]) -> list[bool]:
        return self._each(ids, lambda properties, body: [])

    def _each(
        self,
        ids: Iterable[str],
        instead: Callable[[pika.BasicProperties, bytes], list[Outgoing] | None],
    ) -> list[bool]:
        """Replace some messages, and acknowledge each when the server has its replacements."""
        wanted = list(ids)
        left, tags, items, size = set(wanted), list[int](), list[Outgoing](), 0
        if not left:
            return []
        for look in list(self._looks.values()):
            look.gone |= left
        with short_connection(self._settings) as server:
            for tag, properties, body in server.walk(self._writer.failed):
                job_id = _record(self._writer, properties, body).envelope.id
                made = instead(properties, body) if job_id in left else None
                if made is None:
                    continue
                left.discard(job_id)
                tags.append(tag)
                items += made
                size += sum(len(item.body) for item in made)
                if not left or len(tags) >= PIECE_COUNT or size >= PIECE_BYTES:
                    self._swap(server, tags, items)
                    tags, items, size = [], [], 0
                if not left:
                    break
            if tags:
                self._swap(server, tags, items)
        return [job_id not in left for job_id in wanted]

    def _swap(self, server: ShortConnection, tags: list[int], items: list[Outgoing]) -> None:
        """Store the replacements of some messages, and then acknowledge the messages."""
        if items:
            self._make_known({item.home.queue for item in items})
            self._publish(items)
        point("failed.published")
        for tag in tags:
            server.channel.basic_ack(tag)

    def _again(self, properties: pika.BasicProperties, body: bytes) -> list[Outgoing] | None:
        try:
            job = read(properties, body, redelivered=False)
        except (msgspec.DecodeError, ValueError):
            again = self._writer.write_again(properties, body)
            return None if again is None else [again]
        envelope = msgspec.structs.replace(job.envelope, expires=0.0, delay=0.0, at=0.0)
        return [self._writer.write(Carried(envelope, encode_envelope(envelope)))]


def _record(writer: Writer, properties: pika.BasicProperties, body: bytes) -> Record:
    """The record of a failed message. An unreadable message gets an id, too."""
    headers = cast("dict[str, Any]", properties.headers or {})
    death = death_of(headers)
    error = death.why if death else str(headers.get("error") or "")
    try:
        envelope = read(properties, body, redelivered=False).envelope
    except (msgspec.DecodeError, ValueError) as unreadable:
        job_id = properties.message_id or hashlib.sha1(body).hexdigest()[:20]
        place = writer.origin(headers)
        queue = place.queue if place else str(headers.get("queue") or "?")
        envelope = Envelope(id=job_id, queue=queue)
        error = error or f"it cannot be read: {unreadable}"
    return Record(
        envelope=msgspec.structs.replace(envelope, body=b""),
        state=State.FAILED,
        seq=0,
        rank=envelope.rank,
        max_attempts=envelope.retries.max_attempts,
        attempt=int(headers.get("attempt") or 0),
        finished=death.time if death else float(properties.timestamp or 0),
        error=error,
    )
