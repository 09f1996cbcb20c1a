"""Publish: put a copy of a message into each queue that is bound to its topic, in one commit.

Each publish reads the bindings (:mod:`tidemill.brokers.generic.topics`). The app remembers the
queues of topics for as long as the bindings have the same version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic.topics import Bindings, bindings
from tidemill.client.arguments import TEXT_OF_BODY, summary
from tidemill.client.context import is_importing
from tidemill.client.job_handle import Job
from tidemill.client.options import PUBLISH_OPTIONS, Options
from tidemill.core.backoff import MESSAGE
from tidemill.core.codec import pack, pack_pickle
from tidemill.core.envelope import Envelope
from tidemill.core.errors import InvalidOption, Unroutable
from tidemill.core.job import Put
from tidemill.core.topics import check_topic

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

TOPIC = "topic"
"""The header in each copy that holds the topic."""

_MOST_TOPICS = 10_000
"""The most topics whose queues an app remembers."""

_ONE_QUEUE_ONLY = ("id", "key", "on_conflict", "unique_for", "max_wait", "limit")

_MESSAGE = Options(retries=MESSAGE)


class Publication:
    """One published message: options and body, and handles of the copies once they are stored."""

    def __init__(self, topic: str, template: Envelope, *, mandatory: bool) -> None:
        self.topic = topic
        self.mandatory = mandatory
        self.jobs: list[Job[Any]] = []
        self._template = template

    def copies(self, mill: Runtime, queues: Sequence[str]) -> list[Envelope]:
        """A copy for each queue; ``jobs`` become the handles of these copies."""
        copies = [
            mill.seal(msgspec.structs.replace(self._template, queue=queue)) for queue in queues
        ]
        self.jobs[:] = [Job(mill, copy.id) for copy in copies]
        return copies


class _Known:
    """The bindings that the app read last, and a cache of the queues of each topic."""

    def __init__(self, bound: Bindings) -> None:
        self.bindings = bound
        self._queues: dict[str, list[str]] = {}

    def queues_for(self, topic: str) -> list[str]:
        found = self._queues.get(topic)
        if found is None:
            if len(self._queues) >= _MOST_TOPICS:
                self._queues = {}
            found = self._queues[topic] = self.bindings.queues_for(topic)
        return found


class Topics:
    """Publishes the messages of one app."""

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill
        self._known = _Known(Bindings())

    def publish(
        self, topic: str, body: Any, *, mandatory: bool, options: Mapping[str, Any]
    ) -> list[Job[Any]]:
        """Publish one message; see :meth:`tidemill.Tidemill.publish`."""
        mill = self._mill
        mill.features.need(Feature.TOPICS, "publish")
        checked = _checked(options)
        mill.features.use(checked)
        topic = check_topic(topic)
        made = self._publication(topic, body, checked, mandatory=mandatory)
        if is_importing():
            return mill.put(made.copies(mill, [topic]))
        batch = mill.batch_for(checked.txn)
        if batch is not None and batch.publish(made):
            return made.jobs
        if checked.txn is not None:
            mill.features.need(Feature.TRANSACTIONS, "txn=")
        for job, put in zip(made.jobs, self.put([made], checked.txn), strict=True):
            job.placed = put.placed
        return made.jobs

    def _publication(
        self, topic: str, body: Any, options: Options, *, mandatory: bool
    ) -> Publication:
        template = options.envelope()
        template.headers = {**options.headers, TOPIC: topic}
        template.body = pack_pickle(body) if self._mill.pickles else pack(body)
        if len(template.body) <= TEXT_OF_BODY:
            template.text = summary((body,), {})
        return Publication(topic, template, mandatory=mandatory)

    def put(self, parts: Sequence[Envelope | Publication], txn: Any = None) -> list[Put]:
        """Store jobs and the copies of publications in one commit, in order.

        Returns the puts of the jobs and of all copies.

        Raises:
            Unroutable: no queue is bound to the topic of a mandatory publication; nothing was
                stored.
        """
        bound = bindings(self._mill.broker)
        if bound.version != self._known.bindings.version:
            self._known = _Known(bound)
        known = self._known
        jobs = [job for part in parts for job in self._jobs_of(part, known)]
        if lost := _without_queue(parts):
            raise Unroutable(
                f"no queue is bound to the topic {lost.topic!r}, so nothing was stored; bind a "
                "queue, or publish without mandatory"
            )
        return self._mill.broker.put(jobs, txn=txn)

    def _jobs_of(self, part: Envelope | Publication, known: _Known) -> list[Envelope]:
        if isinstance(part, Publication):
            return part.copies(self._mill, known.queues_for(part.topic))
        return [part]


def _without_queue(parts: Sequence[Envelope | Publication]) -> Publication | None:
    """The first mandatory publication that reaches no queue."""
    made = (part for part in parts if isinstance(part, Publication))
    return next((part for part in made if part.mandatory and not part.jobs), None)


def _checked(given: Mapping[str, Any]) -> Options:
    for name in _ONE_QUEUE_ONLY:
        if given.get(name) is not None:
            raise InvalidOption(
                f"publish takes no {name}: it would hold for one message, and publish may store "
                "several; put the message into a queue with this option"
            )
    checked = _MESSAGE.changed("publish", given, PUBLISH_OPTIONS)
    if TOPIC in checked.headers:
        raise InvalidOption(f"publish sets the header {TOPIC!r} itself; choose another name")
    return checked
