"""OpenTelemetry: traces and metrics of jobs and messages, by the conventions for messaging.

    from tidemill.otel import instrument

    mill = instrument(Tidemill())

A call of ``enqueue`` makes a span ``create QUEUE``. The context of the span goes into the header
``traceparent`` of the job. The step that stores jobs is a span ``send``. A worker makes a span
``process QUEUE`` for each run, with a link to the span of the producer. Log records of a run carry
the ids of its trace.

A raw message carries the context of its span ``send``. The step that leases messages is a span
``receive QUEUE``. The step that settles messages is a span ``settle QUEUE``. Both have links to the
spans of the producers. This module needs ``opentelemetry-api``: ``pip install 'tidemill[otel]'``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
)

from tidemill import Tidemill, __version__
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.registry import instrument_calls
from tidemill.client.context import JobContext, trace_ids_from
from tidemill.client.events import NewJob
from tidemill.core.job import Lease, Outcome
from tidemill.core.locks import Lock
from tidemill.core.retry import Retry, Skip, Snooze, WorkerStopping
from tidemill.errors import InvalidOption, LeaseLost

Relation = Literal["link", "child"]

_SYSTEM = "tidemill"
_SENDS = frozenset({"put", "publish"})
"""The calls of a broker that store jobs."""

_SETTLES = {
    Outcome.SUCCESS: "ack",
    Outcome.RELEASE: "release",
    Outcome.RETRY: "retry",
    Outcome.FAIL: "bury",
}
"""The operations that settle a message."""

_HELD_MOST = 10_000
"""The most leased messages whose trace contexts are kept until the messages are settled."""

_EXPECTED = (Retry, Skip, Snooze, WorkerStopping)
"""Exceptions by which a task decides the end of its job. A span does not count them as errors."""

_WRAPPED: list[Callable[[], None]] = []
"""After an app is instrumented, the function that undoes the wrapping of brokers."""

# The conventions want histograms in seconds. Without these bounds the first bucket ends at 5 s.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


def instrument(
    mill: Tidemill,
    *,
    relation: Relation = "link",
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Tidemill:
    """Trace and measure the jobs of an app; returns the app.

    Call this where the app is made, before its first use, so that workers and producers are traced.
    The first call in a process decides the providers of the process's spans ``send``, ``receive``
    and ``settle``.

    Args:
        mill: the app.
        relation: ``"link"`` makes each run a trace of its own that links to its producer.
            ``"child"`` makes each run a part of its producer's trace.
        tracer_provider: the global provider by default.
        meter_provider: the global provider by default.

    Raises:
        InvalidOption: the relation is unknown.
    """
    if relation not in ("link", "child"):
        raise InvalidOption(f"relation must be 'link' or 'child', not {relation!r}")
    telemetry = _Telemetry(relation, tracer_provider, meter_provider)
    mill.on("enqueue")(telemetry.create)
    mill.middleware = (telemetry.process, *mill.middleware)
    if not _WRAPPED:  # one wrapper serves all brokers and apps of the process
        _WRAPPED.append(instrument_calls(telemetry.wrap))
    trace_ids_from(_trace_ids)
    return mill


class _Telemetry:
    """The spans and metrics of one app."""

    def __init__(
        self,
        relation: Relation,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
    ) -> None:
        self._relation = relation
        self._tracer = trace.get_tracer("tidemill", __version__, tracer_provider)
        meter = metrics.get_meter("tidemill", __version__, meter_provider)
        advice = {"explicit_bucket_boundaries_advisory": _SECONDS}
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Jobs that were stored."
        )
        self._stored = meter.create_histogram(
            "messaging.client.operation.duration", "s", "Time of a call of the store.", **advice
        )
        self._received = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were leased."
        )
        self._processed = meter.create_histogram(
            "messaging.process.duration", "s", "Time of a run.", **advice
        )

    # -- the producer ---------------------------------------------------------------------------

    def create(self, job: NewJob) -> None:
        """Make the span of a new job, and put its context into the headers."""
        attributes = {**_of("create", "create", job.queue), "tidemill.task": job.task}
        span = self._tracer.start_span(
            f"create {job.queue}", kind=SpanKind.PRODUCER, attributes=attributes
        )
        propagate.inject(job.headers, trace.set_span_in_context(span))
        span.end()

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a broker, in a span if it stores jobs, or leases or settles messages."""
        if name == "exchange":
            return _Steps(self, call)
        return functools.partial(self._send, name, call) if name in _SENDS else call

    def _send(self, name: str, call: Callable[..., Any], jobs: Any, *args: Any, **kw: Any) -> Any:
        attributes = _of(name, "send", _only([job.queue for job in jobs]))
        counted = {**attributes, "messaging.batch.message_count": len(jobs)}
        messages = [job for job in jobs if job.is_message and not _context_of(job.headers).is_valid]

        def send() -> Any:
            for job in messages:
                job.headers = dict(job.headers)
                propagate.inject(job.headers)
            return call(jobs, *args, **kw)

        kind = SpanKind.PRODUCER if messages else SpanKind.CLIENT
        stored = self.client_call(send, attributes, kind, counted)
        self._sent.add(len(jobs), attributes)
        return stored

    def client_call(
        self,
        call: Callable[[], Any],
        attributes: dict[str, Any],
        kind: SpanKind = SpanKind.CLIENT,
        more: dict[str, Any] | None = None,
        links: Sequence[Link] = (),
    ) -> Any:
        """Call the store in a span, and measure the call. The span also gets ``more``."""
        began = time.perf_counter()
        try:
            with self._tracer.start_as_current_span(
                _title(attributes),
                kind=kind,
                attributes={**attributes, **(more or {})},
                links=links,
            ):
                return call()
        except Exception as error:
            attributes["error.type"] = type(error).__qualname__
            raise
        finally:
            self._stored.record(time.perf_counter() - began, attributes)

    # -- consumers of messages ------------------------------------------------------------------

    def receive(self, found: Sequence[_Held], began: int) -> None:
        """Make the span of a step that has leased messages; ``began`` is its start in ns."""
        attributes = _of("get", "receive", _only([one.queue for one in found]))
        span = self._tracer.start_span(
            _title(attributes),
            kind=SpanKind.CLIENT,
            attributes={**attributes, **_which(found)},
            links=_links(found),
            start_time=began,
        )
        span.end()
        self._stored.record((time.time_ns() - began) / 1e9, attributes)
        self._received.add(len(found), attributes)

    # -- the worker -----------------------------------------------------------------------------

    def process(self, job: JobContext) -> Iterator[None]:
        """The middleware: a span around each run."""
        sender = propagate.extract(job.headers, Context())
        linked = _context_of(job.headers)
        attributes = _of("process", "process", job.queue)
        child = self._relation == "child"
        span = self._tracer.start_span(
            f"process {job.queue}",
            context=sender if child else Context(),
            kind=SpanKind.CONSUMER,
            links=[Link(linked)] if linked.is_valid and not child else (),
            attributes={
                **attributes,
                "messaging.message.id": job.id,
                "tidemill.task": job.task,
                "tidemill.attempt": job.attempt,
            },
        )
        attributes["tidemill.task"] = job.task
        began = time.perf_counter()
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            self._failed(span, error, attributes)
            raise
        finally:
            self._processed.record(time.perf_counter() - began, attributes)
            span.end()

    def _failed(self, span: Span, error: BaseException, attributes: dict[str, Any]) -> None:
        name = type(error).__qualname__
        if isinstance(error, _EXPECTED):
            span.add_event(name, {"reason": str(error)})
            return
        attributes["error.type"] = name
        span.set_attribute("error.type", name)
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, f"{name}: {error}"))


class _Held(NamedTuple):
    """A leased message, and the context of its producer."""

    queue: str
    id: str
    sender: SpanContext


class _Steps:
    """The call ``exchange`` of one broker, with spans for steps that lease or settle messages.

    A worker leases and settles tasks by the same call; these steps have no span.
    """

    def __init__(self, telemetry: _Telemetry, call: Callable[..., Any]) -> None:
        self._telemetry = telemetry
        self._call = call
        self._lock = Lock()
        self._held: dict[int, _Held] = {}  # by the token of the lease

    def __call__(self, step: Step, *args: Any, **kw: Any) -> Any:
        began = time.time_ns()
        reply: Reply = self._settle(step, args, kw)
        if step.want is not None and step.want.messages and reply.leases:
            self._receive(reply.leases, began)
        return reply

    def _settle(self, step: Step, args: Any, kw: Any) -> Any:
        with self._lock:
            popped = [(v, self._held.pop(v.token, None)) for v in step.verdicts if self._held]
        settled = [(verdict, one) for verdict, one in popped if one is not None]
        if not settled:
            return self._call(step, *args, **kw)
        found = [one for _, one in settled]
        name = _only([_SETTLES.get(Outcome(v.outcome), "settle") for v, _ in settled]) or "settle"
        attributes = _of(name, "settle", _only([one.queue for one in found]))

        def settle() -> Any:
            reply = self._call(step, *args, **kw)
            if False in reply.settled:  # the lease of at least one message in this step was lost
                trace.get_current_span().set_attribute("error.type", LeaseLost.__qualname__)
            return reply

        return self._telemetry.client_call(
            settle, attributes, more=_which(found), links=_links(found)
        )

    def _receive(self, leases: Sequence[Lease], began: int) -> None:
        found = []
        for lease in leases:
            try:
                envelope = lease.open()
            except Exception:  # an unreadable envelope: the consumer will bury the message
                continue
            if not envelope.is_message:  # a job server also leases tasks for its clients
                continue
            one = _Held(envelope.queue, envelope.id, _context_of(envelope.headers))
            found.append(one)
            with self._lock:
                self._held[lease.token] = one
                if len(self._held) > _HELD_MOST:
                    del self._held[next(iter(self._held))]
        if found:
            self._telemetry.receive(found, began)


def _context_of(headers: Mapping[str, str]) -> SpanContext:
    """The context of the span that made a job or message; an invalid context without a span."""
    return trace.get_current_span(propagate.extract(headers, Context())).get_span_context()


def _links(found: Sequence[_Held]) -> list[Link]:
    return [Link(one.sender) for one in found if one.sender.is_valid]


def _which(found: Sequence[_Held]) -> dict[str, Any]:
    """The id of a single message, or the number of several messages, as attributes."""
    if len(found) == 1:
        return {"messaging.message.id": found[0].id}
    return {"messaging.batch.message_count": len(found)}


def _only(names: Sequence[str]) -> str:
    """The name if all names are the same, else an empty text."""
    return names[0] if len(set(names)) == 1 else ""


def _title(attributes: dict[str, Any]) -> str:
    """The name of a span: its operation and its queue."""
    queue = attributes.get("messaging.destination.name", "")
    return f"{attributes['messaging.operation.type']} {queue}".strip()


def _of(name: str, kind: str, queue: str) -> dict[str, Any]:
    """The attributes that spans and metrics share."""
    attributes = {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
    }
    return {**attributes, "messaging.destination.name": queue} if queue else attributes


def _trace_ids(job: JobContext | None) -> tuple[str, str]:
    """The ids of the trace and the span for a log record.

    Outside of a span, a record of a job gets the ids of the producer's trace. For example, the line
    about the end of a run is logged after the end of the run's span.
    """
    found = trace.get_current_span().get_span_context()
    if not found.is_valid and job is not None and job.headers:
        found = _context_of(job.headers)
    if not found.is_valid:
        return "", ""
    return trace.format_trace_id(found.trace_id), trace.format_span_id(found.span_id)
