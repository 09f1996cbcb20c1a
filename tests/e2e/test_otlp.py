"""OpenTelemetry as users have it: real processes export by OTLP over HTTP to a receiver."""

from __future__ import annotations

import contextlib
import gzip
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
from harness import Place
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

APP = """
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tidemill.otel import instrument

resource = Resource.create({{"service.name": "shop", "process.pid": os.getpid()}})
tracers = TracerProvider(resource=resource)
tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
meters = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=resource)
instrument(mill, relation={relation!r}, tracer_provider=tracers, meter_provider=meters)
tracer = tracers.get_tracer("shop")

@mill.on("process_stop")
def flush():
    tracers.shutdown()
    meters.shutdown()

@mill.task(name="pay", retries=0)
def pay(amount):
    with tracer.start_as_current_span("charge"):
        if amount < 0:
            raise ValueError("no money")
"""

PRODUCE = """
from {app} import flush, mill, pay, tracer
with tracer.start_as_current_span("checkout"):
    pay.using(id="good").enqueue(10)
    pay.using(id="bad").enqueue(-1)
    mill.queue("orders").put("one", id="m1")
flush()
"""

CONSUME = """
from {app} import flush, mill
with mill.queue("orders").get(60) as message:
    assert message.body == "one"
flush()
"""


class Received(NamedTuple):
    """A span, and the process that sent it."""

    span: Span
    pid: int

    @property
    def attributes(self) -> dict[str, Any]:
        return plain(self.span.attributes)

    @property
    def linked(self) -> list[tuple[bytes, bytes]]:
        return [(link.trace_id, link.span_id) for link in self.span.links]

    @property
    def here(self) -> tuple[bytes, bytes]:
        return self.span.trace_id, self.span.span_id


class Receiver:
    """A receiver of OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self._counts: dict[tuple[str, Any], float] = {}
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/x-protobuf"
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = receiver.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, path: str, body: bytes) -> bytes:
        if path == "/v1/metrics":
            found = metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
            with self._lock:
                self._take_metrics(found)
            return metrics_service_pb2.ExportMetricsServiceResponse().SerializeToString()
        assert path == "/v1/traces"
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.spans += [
                Received(span, plain(of.resource.attributes)["process.pid"])
                for of in request.resource_spans
                for scope in of.scope_spans
                for span in scope.spans
            ]
        return trace_service_pb2.ExportTraceServiceResponse().SerializeToString()

    def _take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        """Keep the latest count of each series: a process that lives long exports it twice."""
        for of in request.resource_metrics:
            pid = plain(of.resource.attributes)["process.pid"]
            for scope in of.scope_metrics:
                for metric in scope.metrics:
                    for point in (*metric.sum.data_points, *metric.histogram.data_points):
                        names = tuple(sorted(plain(point.attributes).items()))
                        series = metric.name, (pid, names)
                        count = getattr(point, "count", 0) or point.as_int
                        self._counts[series] = count

    def metric(self, name: str) -> float:
        """The sum of a metric over all its series."""
        return sum(count for (of, _), count in self._counts.items() if of == name)

    def named(self, name: str) -> list[Received]:
        return [one for one in self.spans if one.span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with contextlib.closing(Receiver()) as receiver:
        yield receiver


def ran(place: Place, receiver: Receiver, relation: str) -> None:
    """Let a producer, a worker and a consumer run, each in a process of its own."""
    place.write(APP.format(relation=relation), load=False)
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
    for program in (PRODUCE, CONSUME):
        code = program.format(app=place.app)
        subprocess.run(
            [sys.executable, "-c", code], cwd=place.path, env={**os.environ, **env},
            check=True, timeout=120,
        )  # fmt: skip
    worker = place.worker("--burst", env=env)
    assert worker.wait() == 0, worker.output


@pytest.mark.parametrize("relation", ["link", "child"])
def test_a_trace_leads_from_the_producer_to_the_run_in_another_process(
    place: Place, receiver: Receiver, relation: str
) -> None:
    ran(place, receiver, relation)
    # given the spans of the producer
    (checkout,) = receiver.named("checkout")
    creates = receiver.named("create default")
    assert [one.span.parent_span_id for one in creates] == [checkout.span.span_id] * 2
    assert {one.span.trace_id for one in creates} == {checkout.span.trace_id}
    assert {one.span.kind for one in creates} == {Span.SPAN_KIND_PRODUCER}
    # then the runs in the worker lead to them
    found = receiver.named("process default")
    runs = {run.attributes["messaging.message.id"]: run for run in found}
    assert runs.keys() == {"good", "bad"}
    for run in runs.values():
        assert run.pid != checkout.pid
        assert run.span.kind == Span.SPAN_KIND_CONSUMER
    if relation == "link":
        linked = [run.linked for run in runs.values()]
        assert sorted(linked) == sorted([[one.here] for one in creates])
        assert checkout.span.trace_id not in {run.span.trace_id for run in runs.values()}
    else:
        parents = [(run.span.trace_id, run.span.parent_span_id) for run in runs.values()]
        assert sorted(parents) == sorted(one.here for one in creates)
    # and what the task does belongs to its run
    charges = receiver.named("charge")
    inside = [(one.span.trace_id, one.span.parent_span_id) for one in charges]
    assert sorted(inside) == sorted(run.here for run in runs.values())
    assert runs["bad"].span.status.code == Status.STATUS_CODE_ERROR
    assert runs["bad"].attributes["error.type"] == "ValueError"
    assert runs["good"].span.status.code == Status.STATUS_CODE_UNSET


def test_a_trace_leads_from_the_put_of_a_message_to_its_consumer(
    place: Place, receiver: Receiver
) -> None:
    ran(place, receiver, "link")
    (checkout,) = receiver.named("checkout")
    (put,) = receiver.named("send orders")
    assert put.span.kind == Span.SPAN_KIND_PRODUCER
    assert put.span.parent_span_id == checkout.span.span_id
    (got,) = receiver.named("receive orders")
    (settled,) = receiver.named("settle orders")
    for one in (got, settled):
        assert one.pid != put.pid
        assert one.span.kind == Span.SPAN_KIND_CLIENT
        assert one.linked == [put.here]
        assert one.attributes["messaging.message.id"] == "m1"
    assert settled.attributes["messaging.operation.name"] == "ack"
    # and the metrics of the three processes came by the same way
    assert receiver.metric("messaging.client.sent.messages") == 3
    assert receiver.metric("messaging.client.consumed.messages") == 1
    assert receiver.metric("messaging.process.duration") == 2
