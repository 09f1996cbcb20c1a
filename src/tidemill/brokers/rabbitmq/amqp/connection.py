"""pika's connection, with a fast path for deliveries, confirms and publications.

A message is three frames of AMQP, and pika makes several objects of every frame. This module reads
and writes these frames in one pass over bytes, many at a time. All other frames go to pika, in
their order, and so do messages of more than one body frame. The fast path uses private parts of
pika, by :func:`part` alone. If another release of pika lacks one of them, pika handles all frames.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import pika
from pika.channel import Channel
from pika.frame import decode_frame

Properties = bytes | pika.BasicProperties  # the bytes of its frame, or what pika has read
# The tag of the consumer, the tag of the message, whether it was handed out before, and the rest.
Delivery = tuple[bytes, int, bool, Properties, bytes]

Confirm = tuple[int, bool, bool]  # its tag, whether it covers earlier tags, whether it is positive

METHOD, HEADER, BODY = 1, 2, 3
_END, _NO_FRAME = b"\xce", b"AMQP"
_PUBLISH, _DELIVER, _ACK, _NACK = ((60 << 16) + method for method in (40, 60, 80, 120))

_HEAD = struct.Struct(">BHI")  # kind, channel and length of a frame
# The same three of a method frame, then class and method as one number, and one more byte.
_METHOD = struct.Struct(">BHIIB")
# The same three of a header frame, then class, a zero and the size of the body.
_HEADER = struct.Struct(">BHIHHQ")
_TAG = struct.Struct(">QB")


def frame_at(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Kind, channel and end of the frame that begins at ``at``; None if too few bytes have come."""
    # A server of another protocol version sends no frame, but eight bytes that name its version.
    if data[at : at + 4] == _NO_FRAME:
        return 0, 0, at + 8
    if len(data) - at < _HEAD.size:
        return None
    kind, channel, length = _HEAD.unpack_from(data, at)
    return kind, channel, at + length + 8


def read_deliveries(data: bytes, at: int, channel: int) -> tuple[list[Delivery], int]:
    """The complete deliveries of a channel from ``at`` on, and their end."""
    found: list[Delivery] = []
    size = len(data)
    try:
        while True:
            kind, number, length, method, name = _METHOD.unpack_from(data, at)
            if method != _DELIVER or number != channel or kind != METHOD:
                break
            begin, header = at + 12, at + length + 8
            tag, redelivered = _TAG.unpack_from(data, begin + name)
            kind, _, length, _, _, body_size = _HEADER.unpack_from(data, header)
            body = header + length + 8
            second, _, length = _HEAD.unpack_from(data, body)
            end = body + length + 8
            whole = end <= size and length == body_size and kind == HEADER and second == BODY
            if not whole or data[end - 1] != _END[0]:
                break
            properties, content = data[header + 19 : body - 1], data[body + 7 : end - 1]
            consumer = data[begin : begin + name]
            found.append((consumer, tag, bool(redelivered & 1), properties, content))
            at = end
    except struct.error:
        pass  # the rest of the frame has not arrived yet
    return found, at


_CONFIRM = struct.Struct(">BHIIQBB")


def read_confirms(data: bytes, at: int, channel: int) -> tuple[list[Confirm], int]:
    """The complete confirms of a channel from ``at`` on, and their end."""
    found: list[Confirm] = []
    last = len(data) - _CONFIRM.size
    while at <= last:
        kind, number, _, method, tag, bits, end = _CONFIRM.unpack_from(data, at)
        if method not in (_ACK, _NACK) or number != channel or kind != METHOD or end != _END[0]:
            break
        found.append((tag, bool(bits & 1), method == _ACK))
        at += _CONFIRM.size
    return found, at


def publication(channel: int, key: str, properties: bytes, body: bytes, most: int) -> bytes:
    """The frames of a mandatory message to a queue, with ``most`` bytes of body in each at most."""
    size = len(body)
    header = _HEADER.pack(HEADER, channel, len(properties) + 12, 60, 0, size)
    frames = [_publish(channel, key), header, properties, _END]
    for start in range(0, size, most):
        part = body[start : start + most]
        frames += [_HEAD.pack(BODY, channel, len(part)), part, _END]
    return b"".join(frames)


@functools.lru_cache(1024)
def _publish(channel: int, key: str) -> bytes:
    ticket, exchange, mandatory = b"\0\0", b"\0", b"\1"
    name = key.encode()
    fields = ticket + exchange + bytes((len(name),)) + name + mandatory
    head = _HEAD.pack(METHOD, channel, 4 + len(fields))
    return head + _PUBLISH.to_bytes(4, "big") + fields + _END


def encoded(properties: pika.BasicProperties) -> bytes:
    return b"".join(properties.encode())


def decoded(properties: Properties) -> pika.BasicProperties:
    if isinstance(properties, bytes):
        read = pika.BasicProperties()
        read.decode(properties)
        return read
    return properties


_RECEIVE = 1 << 16  # bytes read at a time
_AROUND = 8  # bytes of a frame before and after its body

Read = Callable[[bytes, int, int], tuple[list[Any], int]]
"""Reads frames of one kind from bytes: ``read_deliveries`` or ``read_confirms``."""

_NEEDED = ("_adapter_emit_data", "_channels", "_frame_buffer", "_process_frame")


def part(whole: Any, *path: str) -> Any:
    """A private part of pika, by the names that lead to it; None if this release lacks one."""
    for name in path:
        whole = getattr(whole, name, None)
    return whole


class Connection(pika.SelectConnection):
    """A connection. A channel's listener hears deliveries or confirms in the connection thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.is_quick = False  # False if this release of pika lacks a part of the fast path
        super().__init__(*args, **options)
        self.is_quick = all(part(self, name) is not None for name in _NEEDED)
        self._listeners: dict[int, tuple[Channel, Read, Callable[[Any], None]]] = {}

    def hear(self, channel: Channel, read: Read, heard: Callable[[Any], None]) -> None:
        """Pass what ``read`` finds to ``heard``, many at a time, as long as the channel lives."""
        if (transport := part(self, "_transport")) is not None:
            transport._MAX_RECV_BYTES = _RECEIVE
        self._listeners[channel.channel_number] = channel, read, heard

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
        listener = self._listeners.get(number)
        if listener is None or part(self, "_channels").get(number) is not listener[0]:
            return at
        _, read, heard = listener
        found, end = read(data, at, number)
        if found:
            self.frames_received += len(found) * (3 if read is read_deliveries else 1)
            heard(found)
        return end
