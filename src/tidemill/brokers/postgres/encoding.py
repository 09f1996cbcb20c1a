"""The packing of arrays in PostgreSQL's binary format, and the unpacking of leases.

psycopg packs a list item by item, and looks up the packer of each item. A batch has thousands of
items, so this packing would cost more than all other work of a call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import psycopg
from psycopg import pq
from psycopg.adapt import Buffer, Dumper
from psycopg.types.json import set_json_loads

from tidemill.core.job import Input, Lease, State

_HEAD = struct.Struct("!iiIii")
_LENGTH = struct.Struct("!i")
_LEASE = struct.Struct("!qiiqqdddi")
_STATES = tuple(State)
_json = msgspec.json.Encoder()


class _Packed:
    """A packed array, with its items; each type of items has a subclass."""

    __slots__ = ("data", "items")

    def __init__(self, data: bytes, items: Sequence[Any]) -> None:
        self.data = data
        self.items = items


class _Ints(_Packed): ...


class _Floats(_Packed): ...


class _Texts(_Packed): ...


class _Blobs(_Packed): ...


def _fixed(code: str, oid: int, values: Sequence[Any]) -> bytes:
    count = len(values)
    if not count:
        return struct.pack("!iiI", 0, 0, oid)
    interleaved = [8] * (2 * count)
    interleaved[1::2] = values
    return _HEAD.pack(1, 0, oid, count, 1) + struct.pack(f"!{('i' + code) * count}", *interleaved)


def _varying(oid: int, values: Sequence[bytes]) -> bytes:
    if not values:
        return struct.pack("!iiI", 0, 0, oid)
    parts = [_HEAD.pack(1, 0, oid, len(values), 1)]
    for value in values:
        parts += (_LENGTH.pack(len(value)), value)
    return b"".join(parts)


def ints(values: Sequence[int]) -> Any:
    """Pack a ``bigint[]``."""
    return _Ints(_fixed("q", 20, values), values)


def floats(values: Sequence[float]) -> Any:
    return _Floats(_fixed("d", 701, values), values)


def texts(values: Sequence[str]) -> Any:
    return _Texts(_varying(25, [value.encode() for value in values]), values)


def blobs(values: Sequence[bytes]) -> Any:
    """Pack a ``bytea[]``."""
    return _Blobs(_varying(17, values), values)


def plain(argument: Any) -> Any:
    """An argument for a driver that packs arrays itself."""
    return argument.items if isinstance(argument, _Packed) else argument


def clean(text: str) -> str:
    """Replace NUL characters, which PostgreSQL cannot store in a text."""
    return text.replace("\0", "\ufffd") if "\0" in text else text


def json(value: Any) -> str:
    """Encode a ``jsonb``, as text."""
    return _json.encode(value).decode()


def _dumper(array_oid: int) -> type[Dumper]:
    class Packed(Dumper):
        format = pq.Format.BINARY
        oid = array_oid

        def dump(self, obj: _Packed) -> Buffer | None:
            return obj.data

    return Packed


_DUMPERS = [
    (kind, _dumper(oid))
    for kind, oid in ((_Ints, 1016), (_Floats, 1022), (_Texts, 1009), (_Blobs, 1001))
]


def prepare(
    context: psycopg.Connection[Any] | psycopg.Cursor[Any] | psycopg.AsyncCursor[Any],
) -> None:
    """Register the packed arrays and the JSON decoder at a connection or a cursor."""
    for kind, dumper in _DUMPERS:
        context.adapters.register_dumper(kind, dumper)
    set_json_loads(msgspec.json.decode, context)


def leases_of(packed: bytes) -> list[Lease]:
    """Unpack the leases that ``pack`` in ``sql/46_claim.sql`` wrote."""
    leases = []
    at = 0
    while at < len(packed):
        token, attempt, losses, rank, seq, timeout, leased, ttr, size = _LEASE.unpack_from(
            packed, at
        )
        at += _LEASE.size
        envelope = packed[at : at + size]
        inputs, at = _inputs_of(packed, at + size)
        leases.append(
            Lease(token, attempt, losses, rank, seq, timeout, leased, ttr, envelope, inputs)
        )
    return leases


def _inputs_of(packed: bytes, at: int) -> tuple[tuple[Input, ...], int]:
    (count,) = _LENGTH.unpack_from(packed, at)
    at += 4
    if not count:
        return (), at
    inputs = []
    for _ in range(count):
        name, at = _blob(packed, at)
        (state,) = _LENGTH.unpack_from(packed, at)
        result, at = _blob(packed, at + 4)
        error, at = _blob(packed, at)
        known = _STATES[state].value if state >= 0 else ""
        inputs.append(Input(name.decode(), known, result, error.decode()))
    return tuple(inputs), at


def _blob(packed: bytes, at: int) -> tuple[bytes, int]:
    (size,) = _LENGTH.unpack_from(packed, at)
    return packed[at + 4 : at + 4 + size], at + 4 + size
