"""The floor under tidemill on RabbitMQ: its driver alone, on a durable classic queue.

What is put is confirmed: alone one by one, in bulk a thousand at a time. Two consumers ack a
hundred messages at once, and the rest when no more came for a moment.
"""

import os
import struct
import threading

import pika
from marks import mark
from processes import spawn_python

URL = os.environ["BENCH_RABBITMQ_URL"]
QUEUE, ACKS, WINDOW, PAUSE = "floor", 100, 1000, 0.02
KEPT = pika.BasicProperties(delivery_mode=2)
PADDING = b"x" * 100
STAMP = struct.Struct("<d")

_own = threading.local()  # of each thread: a connection serves one


def _channel():
    if not hasattr(_own, "channel"):
        _own.channel = pika.BlockingConnection(pika.URLParameters(URL)).channel()
        _own.channel.confirm_delivery()
    return _own.channel


def setup(tmp):
    _channel().queue_declare(QUEUE, durable=True)


def enqueue_one(stamp=0.0):
    _channel().basic_publish("", QUEUE, STAMP.pack(stamp) + PADDING, KEPT)


class Bulk:
    """Publishes many and awaits their confirms together, which only pika's callbacks can."""

    def __init__(self):
        self.done = threading.Event()
        self.sent = 0
        self.connection = pika.SelectConnection(
            pika.URLParameters(URL),
            lambda connection: connection.channel(on_open_callback=self.open),
        )
        threading.Thread(target=self.connection.ioloop.start, daemon=True).start()
        self.done.wait()

    def open(self, channel):
        self.channel = channel
        channel.confirm_delivery(self.confirmed, callback=lambda _: self.done.set())

    def confirmed(self, frame):
        # Of one queue they come in order.
        if frame.method.delivery_tag == self.sent:
            self.done.set()

    def publish(self, count):
        self.sent += count
        for _ in range(count):
            self.channel.basic_publish("", QUEUE, STAMP.pack(0.0) + PADDING, KEPT)

    def put(self, count):
        self.done.clear()
        self.connection.ioloop.add_callback_threadsafe(lambda: self.publish(count))
        self.done.wait()


def enqueue_many(count):
    if not hasattr(_own, "bulk"):
        _own.bulk = Bulk()
    _own.bulk.put(count)


def start_workers():
    return [spawn_python("systems.pika_floor") for _ in range(2)]


def stop():
    _own.channel.connection.close()


class Consumer:
    """One worker process."""

    def __init__(self):
        self.unacked = self.last = 0
        self.connection = pika.SelectConnection(
            pika.URLParameters(URL),
            lambda connection: connection.channel(on_open_callback=self.open),
        )
        self.connection.ioloop.start()

    def open(self, channel):
        self.channel = channel
        channel.basic_qos(prefetch_count=WINDOW)
        channel.basic_consume(QUEUE, self.take)
        self.ack_rest()

    def take(self, channel, method, properties, body):
        mark(*STAMP.unpack_from(body))
        self.last = method.delivery_tag
        self.unacked += 1
        if self.unacked == ACKS:
            self.ack()

    def ack(self):
        self.channel.basic_ack(self.last, multiple=True)
        self.unacked = 0

    def ack_rest(self):
        if self.unacked:
            self.ack()
        self.connection.ioloop.call_later(PAUSE, self.ack_rest)


if __name__ == "__main__":
    Consumer()
