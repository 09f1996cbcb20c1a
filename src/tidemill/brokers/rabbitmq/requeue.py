"""Messages that replace the message of a job that ended, or that runs again later."""

from __future__ import annotations

import logging

import msgspec

from tidemill.brokers.rabbitmq.amqp.publish_channel import Outgoing
from tidemill.brokers.rabbitmq.message import Carried, Writer
from tidemill.core.job import Outcome, Verdict, delay_of

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
