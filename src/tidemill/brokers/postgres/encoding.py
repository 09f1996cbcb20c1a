"""What crosses the line, packed: arrays as PostgreSQL's binary format has them, leases as ours.

psycopg packs a list item by item, each with its own lookup; a batch has thousands of items, so that
this would cost more than all the rest.
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

__all__ = ["blobs", "clean", "floats", "ints", "json", "leases_of", "prepare", "texts"]

_HEAD = struct.Struct("!iiIii")
_LENGTH = struct.Struct("!i")
_LEASE = struct.Struct("!qiiqqdddi")
_STATES = tuple(State)
_json = msgspec.json.Encoder()


class _Packed:
    """An array that is packed already; a class for each type of items."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


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
    """A ``bigint[]``."""
    return _Ints(_fixed("q", 20, values))


def floats(values: Sequence[float]) -> Any:
    """A ``float8[]``."""
    return _Floats(_fixed("d", 701, values))


def texts(values: Sequence[str]) -> Any:
    """A ``text[]``."""
    return _Texts(_varying(25, [value.encode() for value in values]))


def blobs(values: Sequence[bytes]) -> Any:
    """A ``bytea[]``."""
    return _Blobs(_varying(17, values))


def clean(text: str) -> str:
    """Text as PostgreSQL can store it: it has no NUL."""
    return text.replace("\0", "\ufffd") if "\0" in text else text


def json(value: Any) -> str:
    """A ``jsonb``, as text."""
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
    """Teach a connection, or a cursor, our arrays."""
    for kind, dumper in _DUMPERS:
        context.adapters.register_dumper(kind, dumper)
    set_json_loads(msgspec.json.decode, context)


def leases_of(packed: bytes) -> list[Lease]:
    """The leases that ``pack`` in ``sql/46_claim.sql`` wrote."""
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
