"""Frames of deliveries, confirms and publications, read and written without objects.

A message is three frames of AMQP, and pika makes several objects of every frame. This module reads
and writes these frames in one pass over bytes. pika handles all other frames, and received messages
of more than one body frame.
"""

from __future__ import annotations

import functools
import struct

import pika

Properties = bytes | pika.BasicProperties
"""The properties of a message: the bytes of its frame, or the object that pika has read."""

Delivery = tuple[bytes, int, bool, Properties, bytes]
"""A message: the tag of its consumer, its own tag, whether it was handed out before, its properties
and its body."""

Confirm = tuple[int, bool, bool]
"""The confirm of a publication: its tag, whether it covers earlier tags, and whether the message is
stored."""

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
    """Kind, channel and end of the frame that begins at ``at``; None if too few bytes have come.

    A server of another protocol version sends no frame, but eight bytes that name its version.
    """
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
    """Properties as the bytes of a frame."""
    return b"".join(properties.encode())


def decoded(properties: Properties) -> pika.BasicProperties:
    """Properties as an object of pika."""
    if isinstance(properties, bytes):
        read = pika.BasicProperties()
        read.decode(properties)
        return read
    return properties
