"""OpenTelemetry: the spans and metrics of raw messages."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from test_otel import Telemetry, telemetry

__all__ = ["telemetry"]


def attributes(span: ReadableSpan) -> dict[str, object]:
    found = dict(span.attributes or {})
    assert found.pop("messaging.system") == "tidemill"
    return found


def links(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def of(name: str, kind: str) -> dict[str, object]:
    return {
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": "orders",
    }


def test_a_message_is_followed_from_its_put_to_its_end(telemetry: Telemetry) -> None:
    with telemetry.app() as mill:
        queue = mill.queue("orders")
        queue.put({"n": 1}, id="a")
        message = queue.get()
        assert message.ack()
    (put,), (got,), (ack,) = (telemetry.spans(name) for name in ("put", "get", "ack"))
    assert [span.name for span in (put, got, ack)] == [
        *("send orders", "receive orders", "settle orders")
    ]
    assert [span.kind for span in (put, got, ack)] == [
        *(SpanKind.PRODUCER, SpanKind.CLIENT, SpanKind.CLIENT)
    ]
    one = {"messaging.message.id": "a"}
    assert attributes(got) == {**of("get", "receive"), **one}
    assert attributes(ack) == {**of("ack", "settle"), **one}
    assert links(got) == links(ack) == [put.context.span_id]
    assert message.headers["traceparent"].split("-")[1] == f"{put.context.trace_id:032x}"


def test_messages_of_one_step_have_one_span(telemetry: Telemetry) -> None:
    with telemetry.app() as mill:
        queue = mill.queue("orders")
        queue.put_many(range(3))
        queue.put(3)
        messages = queue.get_many(10)
        assert len(messages) == 4
    first, second = telemetry.spans("put")
    (got,) = telemetry.spans("get")
    assert attributes(got) == {**of("get", "receive"), "messaging.batch.message_count": 4}
    assert sorted(set(links(got))) == sorted([first.context.span_id, second.context.span_id])
    ((_, count),) = telemetry.counts("messaging.client.consumed.messages")
    assert count == 4


@pytest.mark.parametrize("how", ["release", "bury", "retry"])
def test_each_way_to_settle_is_an_operation(telemetry: Telemetry, how: str) -> None:
    with telemetry.app() as mill:
        queue = mill.queue("orders")
        queue.put(1)
        message = queue.get()
        if how == "retry":
            with pytest.raises(ValueError, match="bad"), message:
                raise ValueError("bad")
        else:
            assert getattr(message, how)()
    (settled,) = telemetry.spans(how)
    assert settled.name == "settle orders"
    assert "error.type" not in attributes(settled)


def test_a_lost_lease_is_an_error_of_the_span(telemetry: Telemetry) -> None:
    with telemetry.app() as mill:
        queue = mill.queue("orders")
        queue.put(1, id="a")
        message = queue.get()
        mill.broker.release(message._owner, None)
        assert not message.ack()
    (ack,) = telemetry.spans("ack")
    assert attributes(ack)["error.type"] == "LeaseLost"


def test_a_header_of_the_caller_stays(telemetry: Telemetry) -> None:
    given = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    with telemetry.app() as mill:
        mill.queue("orders").put(1, headers={"traceparent": given, "x": "y"})
        message = mill.queue("orders").get()
    assert message.headers == {"traceparent": given, "x": "y"}
    (got,) = telemetry.spans("get")
    assert links(got) == [0xCDCDCDCDCDCDCDCD]
