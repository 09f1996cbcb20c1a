"""Take all jobs out of the server, to move them to a store (``tidemill move``).

A message is acknowledged when the store has its job. After a kill in between, the server hands
the message out again. Delayed jobs pass from one delay queue to the next, and then to their home.
Places are emptied in this order, so a job that moves during the transfer is found later. A message
on its way between two queues is in neither queue. So the rounds end only when two rounds, with a
pause in between, have found nothing. In the last round a consumer must begin at each place, since
the server reports a place without a leader as empty. A place that does not answer is left out, and
the report names it. Failed jobs come last. After a kill during a retry, a job may be both failed
and ready. Then the ready job counts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from tidemill.brokers.contract.carried_jobs import Remains, Taken
from tidemill.brokers.rabbitmq.amqp.death_header import Death, death_of
from tidemill.brokers.rabbitmq.amqp.publish_windows import Outgoing
from tidemill.brokers.rabbitmq.amqp.short_connection import (
    Seen,
    ShortConnection,
    Unanswered,
    short_connection,
)
from tidemill.brokers.rabbitmq.due import DelayQueues
from tidemill.brokers.rabbitmq.layout import Names, Place
from tidemill.brokers.rabbitmq.message import Carried, Writer, read
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.brokers.rabbitmq.timer_queues import TimerQueues
from tidemill.brokers.rabbitmq.unsupported import unfit
from tidemill.core.clock import clock
from tidemill.core.crash_points import point
from tidemill.core.envelope import Envelope
from tidemill.core.errors import BrokerUnavailable
from tidemill.core.job import Record, State
from tidemill.core.signals import raised_by_handler

_PIECE_COUNT, _PIECE_BYTES = 500, 16_000_000
"""The most messages, and bytes of messages, that are stored at a time."""

_AHEAD = 2 * _PIECE_COUNT
"""The most messages of a place that the server hands out before an acknowledgement."""

_ROUNDS = 10
"""The most rounds through all places."""

_UNANSWERED_MOST = 10
"""The most silent places that a move skips, since each silent place takes long."""

_PAUSE = 1.0
"""Seconds after an empty round until the next round. A job between two queues arrives sooner."""


class TransferOut:
    """The jobs on the server under a prefix, of all given queues."""

    def __init__(
        self,
        settings: Settings,
        names: Names,
        queues: Collection[str],
        writer: Writer,
        publish: Callable[[Sequence[Outgoing]], None],
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._publish = publish
        self._names = names
        self._delays = DelayQueues(settings.prefix)
        self._timers = TimerQueues(names)
        self._delayed = [*self._timers.all(), *self._delays.all_waits()]
        self._waits = {place.name for place in self._delayed}
        self._queues = dict.fromkeys(queues)
        # Missing places, which are not asked again, since a question takes long.
        self._missing: set[str] = set()
        self._stored: set[str] = set()  # runs of copies of suspects that the store has
        self._doubted: set[str] = set()
        self._unanswered: set[str] = set()

    def unfit(self, job: Envelope) -> str:
        """The reason why the server cannot carry a job."""
        return unfit(job)

    def remains(self) -> Remains:
        """Count the ready, delayed and failed jobs. The server does not report leased jobs."""
        while True:
            try:
                with short_connection(self._settings) as server:
                    return self._count(server)
            except Unanswered as error:
                self._leave_out(error)

    def take(self) -> Iterator[Taken]:
        """Take all jobs out of the server, in pieces."""
        found_nothing = failed = False
        number = 0
        while (number := number + 1) <= _ROUNDS:
            found, last = 0, found_nothing or number == _ROUNDS
            try:
                with short_connection(self._settings) as server:
                    for taken in self._round(server, ask_all=last):
                        yield taken
                        found += sum(taken.stored)
                    if number == _ROUNDS or (found_nothing and not found):
                        yield Taken([], remains=self._count(server))
                        break
            except Unanswered as error:
                self._leave_out(error)
                number -= 1
                found_nothing = found_nothing and not found
                continue
            except BrokerUnavailable as error:  # the server may still be making the queue
                if number == _ROUNDS or (failed and not found) or raised_by_handler(error):
                    raise
                failed, found_nothing = True, found_nothing and not found
                continue
            failed, found_nothing = False, not found
            if not found:
                time.sleep(_PAUSE)

    def _leave_out(self, error: Unanswered) -> None:
        """Leave a place out at its second silence. A queue that is being made is silent once."""
        if error.place not in self._doubted:
            self._doubted.add(error.place)
            time.sleep(_PAUSE)
            return
        if len(self._unanswered) == _UNANSWERED_MOST:
            raise error
        self._unanswered.add(error.place)

    def _count(self, server: ShortConnection) -> Remains:
        jobs = consumers = 0
        for queue in list(self._queues):
            counts = [server.count(place) for place in self._homes(queue)]
            jobs += sum(ready for ready, _ in counts)
            consumers += max((served for _, served in counts), default=0)
        for place in self._answering((*self._delayed, self._names.failed)):
            there = server.look(place)
            jobs += there[0] if there else 0
            (self._missing.discard if there else self._missing.add)(place.name)
        return Remains(jobs, consumers, sorted(self._unanswered))

    def _answering(self, places: Iterable[Place]) -> list[Place]:
        return [place for place in places if place.name not in self._unanswered]

    def _homes(self, queue: str) -> list[Place]:
        """The places of a queue, also those of publishers with the other ``queues=`` in the URL."""
        other = replace(self._names, classic=not self._names.classic)
        homes = [
            place
            for kind in ("tasks", "messages")
            for names in (self._names, other)
            for place in names.of(queue, kind)
        ]
        return self._answering(dict.fromkeys(homes))

    def _places(self) -> Iterator[Place]:
        waits = self._answering(self._delayed)
        yield from (wait for wait in waits if wait.name not in self._missing)
        for queue in list(self._queues):  # the set grows: delayed jobs name further queues
            yield from self._homes(queue)
        yield from self._answering([self._names.failed])

    def _round(self, server: ShortConnection, *, ask_all: bool) -> Iterator[Taken]:
        unacknowledged = _Unacknowledged(server)
        for place in self._places():
            there = server.look(place)
            left, asks = there[0] if there else 0, there is not None and ask_all
            if place.alone:
                yield from self._suspects(server, unacknowledged, place, left, asks=asks)
                continue
            while left or asks:  # walk again: held messages may have ended the walk early
                asks = False
                taken = 0
                for piece in _pieces(server.walk(place, left, _AHEAD)):
                    taken += len(piece)
                    yield from self._hand_out(unacknowledged, place, piece)
                left = max(0, min(left - taken, server.count(place)[0])) if taken else 0

    def _suspects(
        self,
        server: ShortConnection,
        unacknowledged: _Unacknowledged,
        place: Place,
        left: int,
        *,
        asks: bool,
    ) -> Iterator[Taken]:
        """Take suspects, one at a time.

        The server counts the deliveries of a suspect, but not who received them. If a move is
        killed, this must not count as another death of a worker. So the move publishes a copy
        before the store takes the suspect. Later the walk finds the copy at the end of the queue,
        and acknowledges the copy if the store has the job.
        """
        for _ in range(2 * left or asks):
            found = server.take(place, min(1, left))
            for seen in found:
                try:
                    job = read(seen.properties, seen.body, redelivered=False)
                except (msgspec.DecodeError, ValueError):
                    unacknowledged.keep([seen.tag])
                    yield Taken([], [_name_of(seen)])
                    continue
                if job.run in self._stored:
                    server.channel.basic_ack(seen.tag)
                    continue
                again = self._again(job)
                self._publish([again])
                server.channel.basic_ack(seen.tag)
                taken = Taken([self._read(place, seen)])
                yield taken
                if all(taken.stored):
                    self._stored.add(read(again.properties, again.body, redelivered=False).run)
            if not found:
                break

    def _again(self, job: Carried) -> Outgoing:
        losses = job.losses + job.deliveries
        return self._writer.write(replace(job, losses=losses, rest=0.0), job.rest)

    def _hand_out(
        self, unacknowledged: _Unacknowledged, place: Place, piece: list[Seen]
    ) -> Iterator[Taken]:
        taken, came = Taken([]), list[Seen]()
        for seen in piece:
            try:
                record = self._read(place, seen)
            except (msgspec.DecodeError, ValueError):
                taken.strange.append(_name_of(seen))
                continue
            self._queues.setdefault(record.envelope.queue)
            taken.records.append(record)
            came.append(seen)
        unacknowledged.keep([seen.tag for seen in piece])
        once = {s.tag for s, r in zip(came, taken.records, strict=True) if _is_once(r)}
        unacknowledged.forget(sorted(once))
        yield taken
        done = [seen.tag for seen, done in zip(came, taken.stored, strict=False) if done]
        unacknowledged.forget([tag for tag in done if tag not in once])
        self._publish(
            [
                self._as_it_was(seen, record)
                for seen, record in zip(came, taken.records, strict=True)
                if seen.tag in once and taken.stored and seen.tag not in done
            ]
        )
        point("move.acknowledged")

    def _as_it_was(self, seen: Seen, record: Record) -> Outgoing:
        """A copy of an acknowledged message whose job the store did not take."""
        job = replace(read(seen.properties, seen.body, redelivered=False), rest=0.0)
        return self._writer.write(job, record.due - clock.wall() if record.due else 0.0)

    def _read(self, place: Place, seen: Seen) -> Record:
        job = read(seen.properties, seen.body, redelivered=False)
        e, state, due, finished = job.envelope, State.READY, 0.0, 0.0
        death: Death | None = None
        if place.name == self._names.failed.name:
            state, finished = State.FAILED, float(seen.properties.timestamp or 0) or clock.wall()
            death = death_of(seen.properties.headers or {})
        elif place.name in self._waits or job.rest:
            state, due = State.SCHEDULED, self._due(place, seen, job)
        ends = e.expires and state is not State.FAILED
        return Record(
            envelope=e,
            state=state,
            seq=0,
            rank=e.rank,
            max_attempts=e.retries.max_attempts,
            attempt=job.attempt,
            losses=job.losses + (job.deliveries if place.alone else 0),
            due=due,
            expires=e.created + e.expires if ends else 0.0,
            finished=death.time if death else finished,
            error=death.why if death else job.error,
        )

    def _due(self, place: Place, seen: Seen, job: Carried) -> float:
        """The due time of a job by its message, within the bounds of its place."""
        at, now = job.envelope.at, clock.wall()
        # The job has left the delay queues. Only the rest beyond their longest delay remains.
        if place.name not in self._waits:
            return now + job.rest
        if at and abs(job.due - at) < 0.002:
            return at
        if self._timers.level(place.name) is not None:
            return max(now, job.due)
        least, most = self._delays.left(place, seen.key)
        due = job.due or float("inf")
        return min(max(due, now + least + job.rest), now + most + job.rest)


class _Unacknowledged:
    """The messages that one short connection took and has not acknowledged yet."""

    def __init__(self, server: ShortConnection) -> None:
        self._server = server
        self._tags: set[int] = set()

    def keep(self, tags: Collection[int]) -> None:
        """Add messages that came."""
        self._tags.update(tags)

    def forget(self, tags: list[int]) -> None:
        """Acknowledge messages: the server may forget them."""
        self._tags.difference_update(tags)
        last = max(tags, default=0)
        if tags and not any(tag < last for tag in self._tags):
            self._server.channel.basic_ack(last, multiple=True)
            return
        for tag in tags:
            self._server.channel.basic_ack(tag)


def _is_once(record: Record) -> bool:
    """True when a message runs at most once: it is acknowledged before the store has the job."""
    e = record.envelope
    return e.is_message and e.ttr == 0 and record.state is not State.FAILED


def _pieces(messages: Iterator[Seen]) -> Iterator[list[Seen]]:
    piece, size = list[Seen](), 0
    for seen in messages:
        piece.append(seen)
        size += len(seen.body)
        if len(piece) == _PIECE_COUNT or size >= _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _name_of(seen: Seen) -> str:
    """A name for a message that is no job."""
    return seen.properties.message_id or hashlib.sha1(seen.body).hexdigest()[:20]
