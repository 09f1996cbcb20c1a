"""pika's connection, with a fast path for deliveries, confirms and publications.

The received bytes are read once. Deliveries and confirms of a channel with a listener go to that
listener directly, many at a time (:mod:`.frames`). All other frames go to pika, in their order.
pika also delivers messages that come in several pieces, since pika knows each consumer.

The fast path uses private parts of pika. If another release of pika lacks one of them, pika handles
all frames. :func:`part` is the only way to the private parts of pika in this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pika
from pika.channel import Channel
from pika.frame import decode_frame

from tidemill.brokers.rabbitmq.amqp.frames import (
    METHOD,
    Confirm,
    Delivery,
    frame_at,
    read_confirms,
    read_deliveries,
)

_RECEIVE = 1 << 16
"""Bytes read at a time."""

_AROUND = 8
"""Bytes of a frame before and after its body."""

Delivered = Callable[[list[Delivery]], None]
Confirmed = Callable[[list[Confirm]], None]


_NEEDED = ("_adapter_emit_data", "_channels", "_frame_buffer", "_process_frame")


def part(whole: Any, *path: str) -> Any:
    """A private part of pika, by the names that lead to it; None if this release lacks one."""
    for name in path:
        whole = getattr(whole, name, None)
    return whole


class Connection(pika.SelectConnection):
    """A connection. A channel's listener hears deliveries or confirms in the connection thread.

    Attributes:
        is_quick: False if this release of pika lacks a part of the fast path.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.is_quick = False
        super().__init__(*args, **options)
        self.is_quick = all(part(self, name) is not None for name in _NEEDED)
        self._delivered: dict[int, tuple[Channel, Delivered]] = {}
        self._confirmed: dict[int, tuple[Channel, Confirmed]] = {}

    def hear_deliveries(self, channel: Channel, heard: Delivered) -> None:
        """Pass the deliveries of a channel to ``heard`` as long as the channel lives."""
        self._begin_to_hear()
        self._delivered[channel.channel_number] = channel, heard

    def hear_confirms(self, channel: Channel, heard: Confirmed) -> None:
        """Pass the confirms of a channel to ``heard`` as long as the channel lives."""
        self._begin_to_hear()
        self._confirmed[channel.channel_number] = channel, heard

    def _begin_to_hear(self) -> None:
        if (transport := part(self, "_transport")) is not None:
            transport._MAX_RECV_BYTES = _RECEIVE

    def write(self, data: bytes, frames: int) -> None:
        """Send frames, in one piece."""
        self.bytes_sent += len(data)
        self.frames_sent += frames
        part(self, "_adapter_emit_data")(data)

    @property
    def body_most(self) -> int:
        """The most bytes of a body in one frame."""
        return int(self.params.frame_max) - _AROUND

    def _on_data_available(self, data_in: bytes) -> None:
        if not self.is_quick:
            whole: Any = super()
            whole._on_data_available(data_in)
            return
        data, at = self._frame_buffer + data_in, 0
        self._frame_buffer = b""
        while (found := frame_at(data, at)) is not None:
            kind, number, end = found
            if kind == METHOD and (after := self._hand_over(data, at, number)) > at:
                self.bytes_received += after - at
                at = after
            elif end <= len(data):
                _, frame = decode_frame(data[at:end])
                self.bytes_received += end - at
                at = end
                if frame is not None:
                    part(self, "_process_frame")(frame)
            else:
                break
        self._frame_buffer = data[at:]

    def _hand_over(self, data: bytes, at: int, number: int) -> int:
        """Pass the frames from ``at`` on to the listener of a channel. Return their end."""
        here = part(self, "_channels").get(number)
        channel, delivered = self._delivered.get(number, (None, None))
        if delivered is not None and here is channel:
            deliveries, end = read_deliveries(data, at, number)
            if deliveries:
                self.frames_received += 3 * len(deliveries)
                delivered(deliveries)
            return end
        channel, confirmed = self._confirmed.get(number, (None, None))
        if confirmed is not None and here is channel:
            confirms, end = read_confirms(data, at, number)
            if confirms:
                self.frames_received += len(confirms)
                confirmed(confirms)
            return end
        return at
