"""Settle messages: acknowledge them, return them, or move them to the failed jobs.

A message is acknowledged after the server has confirmed the messages that replace it. After a kill
in between, the server has the message and its replacements: at worst the job runs twice. After a
broken connection the server delivers again the messages that were not acknowledged. So this module
remembers the ends of the latest runs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from tidemill.brokers.rabbitmq.amqp.channel import ConsumerChannel
from tidemill.brokers.rabbitmq.amqp.connection import Properties, decoded
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.brokers.rabbitmq.message import Carried, Writer
from tidemill.brokers.rabbitmq.message import read as read_message
from tidemill.brokers.rabbitmq.put import Outgoing, Publisher
from tidemill.brokers.rabbitmq.queue_state import HeldMessage, QueueState
from tidemill.core.clock import clock
from tidemill.core.job import CONSUMER_DIED, Outcome, Verdict, delay_of
from tidemill.core.locks import RLock
from tidemill.core.retry import backoff

log = logging.getLogger("tidemill.rabbitmq")

SUSPECT = 10
"""Deliveries without an end after which a task is a suspect: it may have killed its workers.

Another task may have killed these workers. So a suspect goes to a place whose jobs run alone, one
at a time on each worker. A worker that dies there was killed by the suspect.
"""

_MANY_RETURNS = 5
"""Deliveries after which a returned job goes back as a new message.

The server counts returns and deaths of workers together, as deliveries. The new message counts half
of these as deaths. So a task that kills its workers is found, even if it was also returned
sometimes.
"""

_REMEMBERED = 20_000  # the number of runs whose end is remembered


class _Left:
    """A message that is acknowledged, or will be when its replacements are stored."""

    __slots__ = ("era", "stored", "tag")

    def __init__(self, tag: int, era: int) -> None:
        self.tag = tag
        self.era = era
        self.stored = False


class Settlement:
    """Settles the messages of one owner."""

    # ``held`` has the owner's leases, and ``lock`` is the owner's lock. ``announce`` makes messages
    # that announce new queue names. ``sent_back`` is called with the places to which messages went.

    def __init__(
        self,
        channel: ConsumerChannel,
        publisher: Publisher,
        writer: Writer,
        held: Mapping[int, HeldMessage],
        lock: RLock,
        announce: Callable[[Sequence[str]], Sequence[Outgoing]],
        sent_back: Callable[[Sequence[Place]], None],
    ) -> None:
        self._channel = channel
        self._publisher = publisher
        self._writer = writer
        self._held = held
        self._lock = lock
        self._ended: OrderedDict[str, Verdict | _Left] = OrderedDict()  # how runs ended, by run
        self._sent_back = sent_back
        self._announce = announce
        self.lost: dict[str, HeldMessage] = {}  # by run: leases whose messages the server has again
        self.storing = 0  # the number of messages whose replacements are on their way to the server

    # -- leaving --------------------------------------------------------------------------------

    def close(self, hold: HeldMessage, verdict: Verdict) -> None:
        """Settle a message by the verdict on its job."""
        if goes_back(verdict, changed=hold.changed):
            self.give_back(hold)
            return
        hold.job, items = after(hold.job, verdict, self._writer)
        self.finish(hold, [*self._announce([job.queue for job in verdict.followers]), *items])

    def finish(self, hold: HeldMessage, items: Sequence[Outgoing] = ()) -> None:
        """Acknowledge a message, after the server has stored the messages that replace it."""
        left = _Left(hold.tag, hold.era)
        hold.tag = 0
        self.remember(hold.run, left)
        if items:
            self.storing += 1
            self._store(left, items)
        else:
            self._acknowledge(left)

    def _store(self, left: _Left, items: Sequence[Outgoing]) -> None:
        def stored() -> None:
            with self._lock:
                self.storing -= 1
                self._acknowledge(left)
                self._sent_back([item.home for item in items])

        self._publisher.send(items, stored)

    def _acknowledge(self, left: _Left) -> None:
        left.stored = True
        self._channel.ack(left.tag, left.era)

    def forget(self, runs: Iterable[str]) -> None:
        """Treat messages of these runs as new when the server hands them out once more."""
        for run in runs:
            self._ended.pop(run, None)

    def remember(self, run: str, end: Verdict | _Left) -> None:
        """Remember how a run ended, in case the server hands its message out once more."""
        self._ended[run] = end
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def give_back(self, hold: HeldMessage) -> None:
        """Return a message, so that the server hands it to another owner. No attempt is counted."""
        if not hold.tag:
            return
        job, alone = hold.job, hold.state.place.alone
        if alone:
            again = msgspec.structs.replace(job, losses=job.losses + job.deliveries)
        else:
            again = msgspec.structs.replace(job, handed=job.handed + job.deliveries // 2)
        if alone or job.deliveries >= _MANY_RETURNS or _would_count(job):
            self.finish(hold, [self._writer.write(again)])
            return
        tag, hold.tag = hold.tag, 0
        self._channel.nack(tag, hold.era)
        self._sent_back([hold.state.place])

    # -- arriving messages ----------------------------------------------------------------------

    def read(
        self, state: QueueState, tag: int, redelivered: bool, properties: Properties, body: bytes
    ) -> HeldMessage | bool:
        """The message to lease; False when it was settled here, or when its lease goes on here."""
        try:
            job = read_message(properties, body, redelivered=redelivered)
        except (msgspec.DecodeError, ValueError) as error:
            self._put_aside(state, tag, properties, body, f"it cannot be read: {error}")
            return False
        with self._lock:
            hold = HeldMessage(job, tag, self._channel.era, state)
            if self._is_known(hold, redelivered):
                return False
            looked_at = job.deliveries or job.handed or job.rest or job.envelope.expires
            if (looked_at or state.place.alone) and self._is_over(hold):
                return False
        return hold

    def _is_known(self, hold: HeldMessage, redelivered: bool) -> bool:
        """True when this owner had the message before the connection broke."""
        # Then its job still runs, or has ended.
        ended = self._ended.get(hold.run)
        if isinstance(ended, _Left) and ended.tag and ended.era == hold.era:
            self._channel.ack(hold.tag, hold.era)  # a second copy of a run that has ended here
        elif isinstance(ended, _Left):
            ended.tag, ended.era = hold.tag, hold.era
            if ended.stored:
                self._acknowledge(ended)
        elif ended is not None:
            del self._ended[hold.run]
            self.close(hold, ended)
        else:
            return redelivered and self._goes_on(hold)
        return True

    def _goes_on(self, hold: HeldMessage) -> bool:
        old = self.lost.get(hold.run)
        if old is None or old.tag or self._held.get(old.token) is not old:
            return False
        old.tag, old.era = hold.tag, hold.era
        old.state.held += 1
        return True

    def _is_over(self, hold: HeldMessage) -> bool:
        """Whether the message must not run: not due, expired or suspect. If so, settle it."""
        job, envelope = hold.job, hold.job.envelope
        if job.rest > 0:
            later = msgspec.structs.replace(job, rest=0.0)
            self.finish(hold, [self._writer.write(later, job.rest)])
        elif envelope.expires and envelope.created + envelope.expires <= clock.wall():
            log.info("job %s was not started before it expired", envelope.id)
            self.finish(hold)
        else:
            return self._is_suspect(hold)
        return True

    def _is_suspect(self, hold: HeldMessage) -> bool:
        """Whether the task must not run here. If so, send it to run alone, or fail it."""
        job, envelope = hold.job, hold.job.envelope
        limit = envelope.retries.max_attempts
        if hold.state.place.alone:
            if not limit or job.losses + job.deliveries <= limit:
                return False
            reason = f"its worker died {job.deliveries} times while it had nothing else to run"
            self.finish(hold, [self._writer.write_failed(job, reason)])
        elif limit and not envelope.is_message and job.handed + job.deliveries >= SUSPECT:
            log.warning("job %s runs alone from now on: it may have killed workers", envelope.id)
            alone = msgspec.structs.replace(job, losses=1, handed=0)
            self.finish(hold, [self._writer.write(alone)])
        else:
            return _is_counted(job) and self._has_failed(hold)
        return True

    def _has_failed(self, hold: HeldMessage) -> bool:
        """Count the deliveries of a message as failed attempts, when that delays or ends it."""
        job, policy = hold.job, hold.job.envelope.retries
        attempt = job.attempt + job.deliveries
        failed = msgspec.structs.replace(job, attempt=attempt, error=CONSUMER_DIED, handed=0)
        delay = backoff(policy, attempt)
        if attempt >= policy.max_attempts:
            self.finish(hold, [self._writer.write_failed(failed, CONSUMER_DIED)])
        elif delay > 0:
            self.finish(hold, [self._writer.write(failed, delay)])
        else:
            return False
        return True

    def _put_aside(
        self, state: QueueState, tag: int, properties: Properties, body: bytes, why: str
    ) -> None:
        """Move a message that is no job of tidemill to the failed jobs."""
        item = self._writer.write_unreadable(state.place, decoded(properties), body, why)
        with self._lock:
            self.storing += 1
        self._store(_Left(tag, self._channel.era), [item])


def _is_counted(job: Carried) -> bool:
    """True for a message whose earlier deliveries failed, since its consumers died."""
    envelope = job.envelope
    finite = envelope.retries.max_attempts > 0
    return job.deliveries > 0 and envelope.is_message and envelope.ttr != 0 and finite


def _would_count(job: Carried) -> bool:
    """True when one more delivery by the server would delay or end a message."""
    again = msgspec.structs.replace(job, deliveries=job.deliveries + 1)
    policy, attempt = job.envelope.retries, job.attempt + again.deliveries
    return _is_counted(again) and (attempt >= policy.max_attempts or backoff(policy, attempt) > 0)


log = logging.getLogger("tidemill.rabbitmq")


def goes_back(verdict: Verdict, *, changed: bool) -> bool:
    """Whether the message itself goes back, without a new message in its place."""
    plain = verdict.outcome == Outcome.RELEASE and verdict.delay <= 0
    return plain and not verdict.followers and not changed


def after(job: Carried, verdict: Verdict, writer: Writer) -> tuple[Carried, list[Outgoing]]:
    """The job after a run, and the messages to publish before its own message is acknowledged."""
    outcome, error = Outcome(verdict.outcome), verdict.error
    items = [writer.write_new(follower, follower.delay) for follower in verdict.followers]
    if outcome in (Outcome.RETRY, Outcome.FAIL):  # the run ended, so it did not kill its worker
        job = msgspec.structs.replace(job, attempt=job.attempt + 1, error=error, losses=0, handed=0)
    limit = job.envelope.retries.max_attempts
    if outcome is Outcome.FAIL or (outcome is Outcome.RETRY and 0 < limit <= job.attempt):
        items.append(writer.write_failed(job, error))
    elif outcome in (Outcome.RETRY, Outcome.RELEASE):
        items.append(writer.write(job, delay_of(verdict, job.envelope, job.attempt)))
    elif outcome is Outcome.SNOOZE:
        items.append(writer.write(msgspec.structs.replace(job, error=error), verdict.delay))
    elif outcome is Outcome.EXPIRED:
        log.info("job %s was not started before it expired", job.envelope.id)
    return job, items
