"""Frames that we read and write in one pass are equal to the frames of pika."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pika
import pytest
from pika.frame import Body, Frame, Header, Method
from pika.spec import Basic

from tidemill.brokers.rabbitmq.amqp.connection import (
    Connection,
    Delivery,
    decoded,
    encoded,
    publication,
    read_confirms,
    read_deliveries,
)
from tidemill.brokers.rabbitmq.message import CONTENT_TYPE, plain_properties, plain_run

CHANNEL, OTHER = 3, 4
PLAIN = pika.BasicProperties(
    content_type=CONTENT_TYPE, delivery_mode=2, correlation_id="7f", message_id="id", type="täsk"
)


def frames_of(method: Any, properties: Any, body: bytes, most: int, channel: int) -> list[Frame]:
    parts = [body[at : at + most] for at in range(0, len(body), most)]
    bodies = [Body(channel, part) for part in parts]
    return [Method(channel, method), Header(channel, len(body), properties), *bodies]


def wire_of(frames: list[Frame]) -> bytes:
    return b"".join(frame.marshal() for frame in frames)


class Heard(Connection):
    """A connection without a server: what it is told, in order."""

    def __init__(self) -> None:
        self._frame_buffer, self.is_quick = b"", True
        self.bytes_received = self.frames_received = 0
        self._listeners = {}
        self.told: list[Any] = []
        self._transport: Any = SimpleNamespace()
        self._channels = {n: SimpleNamespace(channel_number=n) for n in (1, CHANNEL, OTHER)}
        channels: Any = self._channels
        self.hear(channels[CHANNEL], read_deliveries, self._deliveries)
        self.hear(channels[OTHER], read_confirms, lambda found: self.told.extend(found))

    def _deliveries(self, found: list[Delivery]) -> None:
        for consumer, tag, again, properties, body in found:
            correlation = decoded(properties).correlation_id
            self.told.append((consumer.decode(), tag, again, correlation, body))

    def _process_frame(self, frame_value: Any) -> None:
        self.told.append(type(frame_value).__name__)
        self.frames_received += 1


def test_however_it_comes_all_that_comes_is_told_in_order() -> None:
    for seed in range(int(os.environ.get("TIDEMILL_EXAMPLES", "20"))):
        hear(seed)


def hear(seed: int) -> None:
    # given: deliveries, confirms and whatever else, as a server mixes them
    chance = random.Random(seed)
    sent, told = b"", list[Any]()
    for tag in range(1, 60):
        body, again = chance.randbytes(chance.randint(1, 90)), chance.random() < 0.3
        headers = {"attempt": tag} if chance.random() < 0.3 else None
        properties = pika.BasicProperties(correlation_id=f"run{tag}", headers=headers)
        match chance.randrange(5):
            case 0:
                sent += wire_of([Method(OTHER, Basic.Ack(tag, chance.random() < 0.5))])
                told.append((tag, sent[-2] & 1 == 1, True))
            case 1:
                sent += wire_of([Method(OTHER, Basic.Nack(tag, multiple=False))])
                told.append((tag, False, False))
            case 2:
                sent += wire_of([Method(CHANNEL, Basic.ConsumeOk("c"))])
                told.append("Method")
            case 3:  # on a channel that nobody listens to
                deliver = Basic.Deliver("c", tag, again, "", "q")
                sent += wire_of(frames_of(deliver, properties, body, 99, 1))
                told += ["Method", "Header", "Body"]
            case _:
                deliver = Basic.Deliver(f"c{tag}", tag, again, "ex", "q")
                sent += wire_of(frames_of(deliver, properties, body, 99, CHANNEL))
                told.append((f"c{tag}", tag, again, f"run{tag}", body))
    # when: it comes in pieces of any size, and wholly
    there, whole, at = Heard(), Heard(), 0
    while at < len(sent):
        size = chance.choice([1, 3, 40, 400])
        there._on_data_available(sent[at : at + size])
        at += size
    whole._on_data_available(sent)
    # then: what was there wholly was told at once, and what was in pieces by pika's way
    assert whole.told == told
    assert whole.bytes_received == there.bytes_received == len(sent)
    assert whole.frames_received == there.frames_received
    assert [one for one in there.told if isinstance(one, tuple)] == [
        one for one in told if one in there.told and isinstance(one, tuple)
    ]
    assert not there._frame_buffer


def test_a_body_of_several_frames_goes_pikas_way() -> None:
    heard = Heard()
    deliver = Basic.Deliver("c", 1, False, "", "q")
    heard._on_data_available(wire_of(frames_of(deliver, PLAIN, b"x" * 25, 10, CHANNEL)))
    assert heard.told == ["Method", "Header", "Body", "Body", "Body"]


def test_a_channel_that_took_the_number_of_another_is_not_told_what_that_was() -> None:
    heard = Heard()
    heard._channels[CHANNEL] = SimpleNamespace(channel_number=CHANNEL)
    deliver = Basic.Deliver("c", 1, False, "", "q")
    heard._on_data_available(wire_of(frames_of(deliver, PLAIN, b"x", 10, CHANNEL)))
    assert heard.told == ["Method", "Header", "Body"]


@pytest.mark.parametrize("size", [0, 1, 100, 101, 1000])
def test_a_publication_is_what_pika_would_send(size: int) -> None:
    body = random.Random(size).randbytes(size)
    publish = Basic.Publish(exchange="", routing_key="a.ö", mandatory=True)
    assert publication(CHANNEL, "a.ö", encoded(PLAIN), body, 100) == wire_of(
        frames_of(publish, PLAIN, body, 100, CHANNEL)
    )


def test_plain_properties_are_those_that_pika_reads_and_writes() -> None:
    plain = plain_properties("7f", "id", "täsk")
    assert plain == encoded(PLAIN)
    assert decoded(plain) == PLAIN
    assert plain_run(plain) == "7f"


def test_a_message_with_a_history_is_not_taken_for_a_plain_one() -> None:
    for more in ({"headers": {"attempt": 1}}, {"priority": 3}, {"content_type": "text/plain"}):
        properties = pika.BasicProperties(**(vars(PLAIN) | more))
        assert plain_run(encoded(properties)) == ""
