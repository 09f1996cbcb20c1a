"""OpenTelemetry: the spans and metrics of jobs, and the ids of traces in log lines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tidemill import InvalidOption, Retries, Tidemill
from tidemill.brokers import registry
from tidemill.client import context as log_attributes
from tidemill.core.log_output import JsonFormatter
from tidemill.core.retry import Snooze
from tidemill.otel import _WRAPPED, instrument
from tidemill.testing import run_all


class Telemetry:
    """Keeps the spans and metrics of a test."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])

    def app(self, **options: Any) -> Tidemill:
        given = {"tracer_provider": self.tracers, "meter_provider": self.meters, **options}
        return instrument(Tidemill("memory://"), **given)

    def spans(self, operation: str) -> list[ReadableSpan]:
        return [
            span
            for span in self.exporter.get_finished_spans()
            if (span.attributes or {})["messaging.operation.name"] == operation
        ]

    def counts(self, name: str) -> list[tuple[dict[str, Any], int]]:
        """The attributes and the number of each point of a metric."""
        data = self.reader.get_metrics_data()
        return [
            (dict(point.attributes), getattr(point, "count", None) or point.value)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Telemetry]:
    factory = logging.getLogRecordFactory()
    yield Telemetry()
    for undo in _WRAPPED:
        undo()
    _WRAPPED.clear()
    log_attributes._find_trace.clear()
    logging.setLogRecordFactory(factory)
    assert not registry._instruments


def test_a_run_links_to_the_span_of_its_producer(telemetry: Telemetry) -> None:
    mill = telemetry.app()
    inside: list[int] = []

    @mill.task(name="t", queue="mail")
    def task() -> None:
        inside.append(trace.get_current_span().get_span_context().span_id)

    with trace.use_span(telemetry.tracers.get_tracer("web").start_span("request")) as request:
        job = task.enqueue()
    run_all(mill)
    (create,), (put,), (run,) = (telemetry.spans(name) for name in ("create", "put", "process"))
    # the producer: in the trace of the request
    for span, kind, name in ((create, SpanKind.PRODUCER, "create"), (put, SpanKind.CLIENT, "send")):
        assert span.parent.span_id == request.get_span_context().span_id
        assert (span.kind, span.name) == (kind, f"{name} mail")
    # the worker: a trace of its own, with a link
    assert (run.kind, run.name, run.parent) == (SpanKind.CONSUMER, "process mail", None)
    assert [link.context.span_id for link in run.links] == [create.context.span_id]
    assert dict(run.attributes or {}) == {
        "messaging.system": "tidemill",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mail",
        "messaging.message.id": job.id,
        "tidemill.task": "t",
        "tidemill.attempt": 1,
    }
    assert inside == [run.context.span_id]  # spans of the task are parts of the run
    assert job.record.envelope.headers.keys() == {"traceparent"}


def test_a_run_can_be_part_of_the_producers_trace(telemetry: Telemetry) -> None:
    mill = telemetry.app(relation="child")

    @mill.task(name="t")
    async def task() -> None:
        await asyncio.sleep(0)

    task.enqueue()
    run_all(mill)
    (create,), (run,) = telemetry.spans("create"), telemetry.spans("process")
    assert run.parent.span_id == create.context.span_id
    assert not run.links


def test_many_jobs_have_a_span_each_and_are_sent_in_one(telemetry: Telemetry) -> None:
    mill = telemetry.app()

    @mill.task(name="t")
    def task() -> None: ...

    mill.enqueue_many([task.call(), task.using(queue="other").call()])
    assert len(telemetry.spans("create")) == 2
    (put,) = telemetry.spans("put")
    assert (put.attributes or {})["messaging.batch.message_count"] == 2
    assert put.name == "send"  # to several queues


def test_errors_are_in_the_span_and_words_of_the_task_are_not(telemetry: Telemetry) -> None:
    mill = telemetry.app()
    tries: list[int] = []

    @mill.task(name="fails", retries=Retries(0))
    def fails() -> None:
        raise ValueError("bad")

    @mill.task(name="later")
    def later() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise Snooze(600)

    fails.enqueue()
    later.enqueue()
    run_all(mill, scheduled=True)
    runs = telemetry.spans("process")
    (failed,) = [run for run in runs if run.status.status_code is StatusCode.ERROR]
    assert (failed.attributes or {})["error.type"] == "ValueError"
    assert [event.name for event in failed.events] == ["exception"]
    (snoozed,) = [run for run in runs if [event.name for event in run.events] == ["Snooze"]]
    assert snoozed.status.status_code is StatusCode.UNSET
    assert len(runs) == 3


def test_jobs_and_runs_are_counted(telemetry: Telemetry) -> None:
    mill = telemetry.app()

    @mill.task(name="t", queue="mail", retries=0)
    def task(n: int) -> None:
        if n:
            raise ValueError

    mill.enqueue_many([task.call(n) for n in (0, 0, 1)])
    run_all(mill)
    ((_, sent),) = telemetry.counts("messaging.client.sent.messages")
    assert sent == 3
    found = {
        of.get("error.type", ""): n for of, n in telemetry.counts("messaging.process.duration")
    }
    assert found == {"": 2, "ValueError": 1}
    ((of, calls),) = telemetry.counts("messaging.client.operation.duration")
    assert (calls, of["messaging.destination.name"]) == (1, "mail")


def test_log_lines_have_the_ids_of_the_trace(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    mill = telemetry.app()

    @mill.task(name="t")
    def task() -> None:
        logging.getLogger("shop").warning("inside")

    task.enqueue()
    caplog.set_level(logging.INFO)
    run_all(mill)
    lines = {
        line["message"].partition("[")[0]: line
        for line in (json.loads(JsonFormatter().format(record)) for record in caplog.records)
    }
    (create,), (run,) = telemetry.spans("create"), telemetry.spans("process")
    inside = lines["inside"]
    assert inside["trace_id"] == trace.format_trace_id(run.context.trace_id)
    assert inside["span_id"] == trace.format_span_id(run.context.span_id)
    # the run is over when its end is logged: the line has the trace of the producer
    assert lines["t"]["trace_id"] == trace.format_trace_id(create.context.trace_id)


def test_an_unknown_relation_is_refused(telemetry: Telemetry) -> None:
    with pytest.raises(InvalidOption, match="relation must be 'link' or 'child'"):
        telemetry.app(relation="parent")


def test_a_put_that_fails_has_its_error(telemetry: Telemetry) -> None:
    mill = telemetry.app()

    @mill.task(name="t")
    def task() -> None: ...

    task.using(id="a").enqueue()
    with pytest.raises(Exception, match="a"):
        task.using(id="a", queue="other").enqueue()
    errors = [
        of.get("error.type") for of, _ in telemetry.counts("messaging.client.operation.duration")
    ]
    assert sorted(map(str, errors)) == ["DuplicateJob", "None"]
