"""Frames that come and go by the thousand, read and written without an object for each.

A message is three frames of AMQP, and pika makes several objects of every frame. What is here does
deliveries, confirms and publications in one pass over bytes; all other frames are pika's business,
and so are messages of more than one body frame, which come as they come.
"""

from __future__ import annotations

import functools
import struct

import pika

__all__ = [
    "Confirm",
    "Delivery",
    "Properties",
    "decoded",
    "encoded",
    "frame_at",
    "publication",
    "read_confirms",
    "read_deliveries",
]

Properties = bytes | pika.BasicProperties
"""Those of a message: as they stand in its frame, or as pika has read them."""

Delivery = tuple[bytes, int, bool, Properties, bytes]
"""A message: whose (the tag of its consumer), its own tag, whether it was handed out before, its
properties and its body."""

Confirm = tuple[int, bool, bool]
"""Of a publication: its tag, whether those before it are meant, too, and whether it is stored."""

METHOD, HEADER, BODY = 1, 2, 3
_END, _NO_FRAME = b"\xce", b"AMQP"
_PUBLISH, _DELIVER, _ACK, _NACK = ((60 << 16) + method for method in (40, 60, 80, 120))

_HEAD = struct.Struct(">BHI")  # kind, channel and length of a frame
_METHOD = struct.Struct(">BHIIB")  # … with its class and method, and a byte of what follows
_HEADER = struct.Struct(">BHIHHQ")  # … of a header, with its class, a zero, and the body's size
_TAG = struct.Struct(">QB")


def frame_at(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Kind and channel of the frame that begins there, and where it ends; None: nobody knows yet.

    Where another protocol is spoken there is no frame, but eight bytes that say so.
    """
    if data[at : at + 4] == _NO_FRAME:
        return 0, 0, at + 8
    if len(data) - at < _HEAD.size:
        return None
    kind, channel, length = _HEAD.unpack_from(data, at)
    return kind, channel, at + length + 8


def read_deliveries(data: bytes, at: int, channel: int) -> tuple[list[Delivery], int]:
    """Deliveries of a channel, one after the other, that are there wholly; and where they end."""
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
        pass  # the rest is on its way
    return found, at


_CONFIRM = struct.Struct(">BHIIQBB")


def read_confirms(data: bytes, at: int, channel: int) -> tuple[list[Confirm], int]:
    """Confirms on a channel, one after the other, and where they end."""
    found: list[Confirm] = []
    last = len(data) - _CONFIRM.size
    while at <= last:
        kind, number, _, method, tag, bits, end = _CONFIRM.unpack_from(data, at)
        if method not in (_ACK, _NACK) or number != channel or kind != METHOD or end != _END[0]:
            break
        found.append((tag, bool(bits & 1), method == _ACK))
        at += _CONFIRM.size
    return found, at


def publication(
    channel: int, exchange: str, key: str, properties: bytes, body: bytes, most: int
) -> bytes:
    """The frames of a mandatory message, of which each has at most so many bytes of the body."""
    size = len(body)
    header = _HEADER.pack(HEADER, channel, len(properties) + 12, 60, 0, size)
    frames = [_publish(channel, exchange, key), header, properties, _END]
    for start in range(0, size, most):
        part = body[start : start + most]
        frames += [_HEAD.pack(BODY, channel, len(part)), part, _END]
    return b"".join(frames)


@functools.lru_cache(1024)
def _publish(channel: int, exchange: str, key: str) -> bytes:
    ticket, mandatory = b"\0\0", b"\1"
    said = ticket + _short(exchange) + _short(key) + mandatory
    return _HEAD.pack(METHOD, channel, 4 + len(said)) + _PUBLISH.to_bytes(4, "big") + said + _END


def _short(text: str) -> bytes:
    encoded = text.encode()
    return bytes((len(encoded),)) + encoded


def encoded(properties: pika.BasicProperties) -> bytes:
    """Properties as they stand in a frame."""
    return b"".join(properties.encode())


def decoded(properties: Properties) -> pika.BasicProperties:
    """Properties as pika reads them."""
    if isinstance(properties, bytes):
        read = pika.BasicProperties()
        read.decode(properties)
        return read
    return properties
