"""Encode bodies and results: Python values to bytes and back. Decoding runs no code.

The encoding is msgpack of plain data (law 18 of ``docs/laws.md``). Types that msgpack lacks travel
as extensions, so they stay exact: tuple, set, frozenset, Decimal, UUID, datetime with its zone,
date, time, timedelta, integers beyond 64 bits, dicts with keys of these types, and references to
the results of other jobs. Dataclasses, msgspec structs, enums and values with a converter travel as
plain data. The annotations of the task restore their types; no data names a type. Pickle is used
only on request, and only with signatures.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import pathlib
import struct
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from tidemill.core.converters import Converter, converter_of, full_name, remedy
from tidemill.core.envelope import RESULT_NOT_KEPT, Envelope, Ref
from tidemill.errors import BadSignature, CodecError, InvalidOption, ResultNotKept

MAX_BODY = 1024 * 1024  # the most bytes of a body
MAX_RESULT = 15 * 1024 * 1024
"""The most bytes of a result. A large write delays other writes; Redis refuses over 512 MiB."""

_TUPLE, _SET, _FROZENSET, _DECIMAL, _UUID, _DATETIME, _DATE, _TIME, _TIMEDELTA = range(1, 10)
_BIGINT, _MAPPING, _REF = 10, 11, 12  # 13: RESULT_NOT_KEPT

_encode = msgspec.msgpack.Encoder().encode
_PLAIN = frozenset({str, bytes, bool, float, type(None)})
_SCALARS = _PLAIN | {int}
_TEXT = frozenset({str})
_SCALAR_BASES = (dt.datetime, dt.date, dt.time, dt.timedelta, decimal.Decimal, uuid.UUID)
_BASES: tuple[Any, ...] = (str, int, float, bytes, list, dict, tuple, set, frozenset)
# What makes the plain value of a subclass, where the class may return the value itself.
_PLAIN_OF = {str: str.__str__, int: int.__int__, float: float.__float__, bytes: bytes.__bytes__}
# The errors of the constructors that decode an extension, when its data are invalid.
_UNDECODABLE = (
    *(msgspec.DecodeError, ValueError, TypeError, ArithmeticError, AttributeError, LookupError),
    *(OSError, RecursionError, struct.error),
)
_SIGNED, _SIGNATURE_SIZE = b"\xc1", 32
"""The first byte of a signed result, with which no msgpack value begins; the signature follows."""

_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1


def pack(value: object) -> bytes:
    """Encode a value. Raises CodecError, which names the type of a value without an encoding."""
    if type(value) is dict and _is_flat(value):
        try:
            return _encode(value)
        except (OverflowError, ValueError):
            pass  # an integer beyond 64 bits, or text with lone surrogates
    try:
        return _encode(_flatten(value))
    except RecursionError:
        raise CodecError("the value is nested too deeply, or contains itself") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"cannot encode the value: {error}") from error


NOT_ENCODED = "the task ended well, but its result cannot be kept"
"""The beginning of the error of a job whose result has no encoding, or is too large."""


def pack_result(value: object) -> bytes:
    """Encode a result; None takes no bytes. Raises CodecError, also above ``MAX_RESULT`` bytes."""
    if value is None:
        return b""
    data = pack(value)
    if len(data) > MAX_RESULT:
        raise CodecError(
            f"the result has {len(data):,} bytes, and a result may have {MAX_RESULT:,}; "
            "store large data elsewhere, and return its name"
        )
    return data


def pack_plain_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes | None:
    """Encode the arguments of a call; None if one of them has a type that msgpack lacks."""
    scalars = _SCALARS.issuperset
    try:
        if scalars(map(type, args)) and scalars(map(type, kwargs.values())):
            return _encode((args, kwargs))
        if _are_plain(args) and _are_plain(kwargs.values()):
            return _encode((args, kwargs))
    except (OverflowError, ValueError, RecursionError):
        pass  # an integer beyond 64 bits, text with lone surrogates, a value inside itself
    return None


def _are_plain(values: Iterable[Any]) -> bool:
    """True when msgpack encodes and decodes these values without a change."""
    if _SCALARS.issuperset(map(type, values)):
        return True
    for value in values:
        kind = type(value)
        if kind is list:
            if not _are_plain(value):
                return False
        elif kind is dict:
            if not _TEXT.issuperset(map(type, value)) or not _are_plain(value.values()):
                return False
        elif kind not in _SCALARS:
            return False
    return True


def _is_flat(value: dict[Any, Any]) -> bool:
    """True when the value needs no conversion before it is encoded, like most bodies."""
    return _SCALARS.issuperset(map(type, value.values())) and _TEXT.issuperset(map(type, value))


def unpack(data: bytes) -> Any:
    """Decode the bytes of :func:`pack`, or of :func:`sign_result` without a look at the signature.

    Raises:
        ResultNotKept: the bytes stand for a result that was not kept.
        CodecError: ``pack`` did not make the bytes.
    """
    if data[:1] == _SIGNED:
        if len(data) == 1 + _SIGNATURE_SIZE:  # the result None has no bytes
            return None
        data = data[1 + _SIGNATURE_SIZE :]
    if data == RESULT_NOT_KEPT:
        raise ResultNotKept("the job succeeded, and the store had no room to keep its result")
    try:
        return _decode(data)
    except _UNDECODABLE as error:
        raise CodecError(f"cannot decode the data: {error}") from error


def _flatten(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if _INT64_MIN <= value <= _UINT64_MAX else _big_int(value)
    if kind is list:
        return [_flatten(item) for item in value]
    if kind is dict:
        keys = [_flatten(key) for key in value]
        items = [_flatten(item) for item in value.values()]
        if Ext in map(type, keys):
            return Ext(_MAPPING, _encode(list(zip(keys, items, strict=True))))
        return dict(zip(keys, items, strict=True))
    special = _ENCODERS.get(kind)
    if special is not None:
        return special(value)
    return _flatten_other(value)


def _flatten_other(value: Any) -> Any:
    """Flatten subclasses, enums, structs, dataclasses, and values with a converter."""
    if isinstance(value, enum.Enum):
        return _flatten(value.value)
    if isinstance(value, msgspec.Struct):
        return {name: _flatten(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _flatten(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    converter = converter_of(type(value))
    if converter is not None:
        return _converted(converter, value)
    for base in _SCALAR_BASES:
        if isinstance(value, base):
            return _ENCODERS[base](value)
    for base in _BASES:
        if issubclass(type(value), base):
            return _flatten(_PLAIN_OF.get(base, base)(value))
        if isinstance(value, base):  # a proxy of such a value
            return _flatten(base(value))
    raise CodecError(f"cannot encode a {full_name(type(value))}: {remedy(value)}")


def _converted(converter: Converter, value: Any) -> Any:
    try:
        data = converter.to(value)
    except CodecError:
        raise
    except Exception as error:  # the converter is a user's code
        raise CodecError(
            f"the converter of {full_name(type(value))} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        return _flatten(data)
    except CodecError:
        if converter.to_json is None:
            raise
        return _flatten(converter.to_json(value))


def _sequence(code: int) -> Callable[[Any], Ext]:
    return lambda value: Ext(code, _encode([_flatten(item) for item in value]))


def _text(code: int) -> Callable[[Any], Ext]:
    return lambda value: Ext(code, str(value).encode())


def _big_int(value: int) -> Ext:
    return Ext(_BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _zoned(code: int) -> Callable[[Any], Ext]:
    return lambda value: Ext(code, _encode([value.isoformat(), value.fold, _zone(value)]))


def _zone(value: dt.datetime | dt.time) -> str:
    zone = value.tzinfo
    if zone is None or isinstance(zone, dt.timezone):
        return ""
    import zoneinfo

    return zone.key if isinstance(zone, zoneinfo.ZoneInfo) and zone.key else ""


_ENCODERS: dict[type, Callable[[Any], Ext]] = {
    tuple: _sequence(_TUPLE),
    set: _sequence(_SET),
    frozenset: _sequence(_FROZENSET),
    decimal.Decimal: _text(_DECIMAL),
    uuid.UUID: lambda value: Ext(_UUID, value.bytes),
    dt.datetime: _zoned(_DATETIME),
    dt.date: lambda value: Ext(_DATE, value.isoformat().encode()),
    dt.time: _zoned(_TIME),
    dt.timedelta: lambda value: Ext(
        _TIMEDELTA, struct.pack(">iii", value.days, value.seconds, value.microseconds)
    ),
    Ref: lambda value: Ext(_REF, _encode(value)),
}


def _decode_zoned(kind: type[dt.datetime | dt.time], data: bytes) -> dt.datetime | dt.time:
    text, fold, zone = _decode(data)
    value = kind.fromisoformat(text)
    if zone:
        import zoneinfo

        value = value.replace(tzinfo=zoneinfo.ZoneInfo(zone))
    return value.replace(fold=fold)


def _decode_timedelta(data: bytes) -> dt.timedelta:
    days, seconds, micros = struct.unpack(">iii", data)
    return dt.timedelta(days, seconds, micros)


_DECODERS: dict[int, Callable[[bytes], Any]] = {
    _TUPLE: lambda data: tuple(_decode(data)),
    _SET: lambda data: set(_decode(data)),
    _FROZENSET: lambda data: frozenset(_decode(data)),
    _DECIMAL: lambda data: decimal.Decimal(data.decode()),
    _UUID: lambda data: uuid.UUID(bytes=data),
    _DATETIME: functools.partial(_decode_zoned, dt.datetime),
    _DATE: lambda data: dt.date.fromisoformat(data.decode()),
    _TIME: functools.partial(_decode_zoned, dt.time),
    _TIMEDELTA: _decode_timedelta,
    _BIGINT: lambda data: int.from_bytes(data, "big", signed=True),
    _MAPPING: lambda data: dict(_decode(data)),
    _REF: msgspec.msgpack.Decoder(Ref).decode,
}


def _extension(code: int, data: memoryview) -> Any:
    decoder = _DECODERS.get(code)
    if decoder is None:
        raise ValueError(f"unknown extension type {code}")
    return decoder(bytes(data))


_decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(ext_hook=_extension).decode


def pack_pickle(value: object) -> bytes:
    """Encode with pickle, for apps that asked for it. The envelope must then be signed."""
    import pickle

    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # pickling runs the value's own code, which may raise anything
        raise CodecError(f"cannot pickle the value: {type(error).__name__}: {error}") from error


def pack_pickle_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    return pack_pickle([list(args), dict(kwargs)])


def unpack_pickle(data: bytes) -> Any:
    """Decode the bytes of :func:`pack_pickle`. Call this only on verified bytes: it runs code."""
    import pickle

    try:
        return pickle.loads(data)
    except Exception as error:
        raise CodecError(f"cannot unpickle the data: {type(error).__name__}: {error}") from error


def sign(envelope: Envelope, key: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) over the format and the lengths, then over id, task and body.

    A schedule's job is signed once, when the schedule is declared: a worker that fires the schedule
    may lack the key. This signature covers a mark and the schedule's name, not the id.
    """
    return _digest(key, _signed_part(envelope))


def verify(envelope: Envelope, keys: Sequence[bytes]) -> None:
    """Raise BadSignature unless one of the keys made the signature; the newest key signs."""
    if not envelope.signature:
        raise BadSignature("bad signature: the job is not signed")
    if not _is_made_by(keys, _signed_part(envelope), envelope.signature):
        raise BadSignature("bad signature: made with a key that is not in secret_keys")


def sign_result(job_id: str, result: bytes, key: bytes) -> bytes:
    """A result with its signature in front, for the jobs that get the result as an argument."""
    return _SIGNED + _digest(key, _signed_part_of(job_id, result)) + result


def verify_result(job_id: str, signed: bytes, keys: Sequence[bytes]) -> None:
    """Raise BadSignature unless one of the keys signed this result of this job."""
    if signed == RESULT_NOT_KEPT:
        return
    if signed[:1] != _SIGNED:
        raise BadSignature(f"bad signature: the result of job {job_id} is not signed")
    end = 1 + _SIGNATURE_SIZE
    if not _is_made_by(keys, _signed_part_of(job_id, signed[end:]), signed[1:end]):
        raise BadSignature(
            f"bad signature: the result of job {job_id} is signed for another job, or with a key "
            "that is not in secret_keys"
        )


def _is_made_by(keys: Sequence[bytes], part: bytes, signature: bytes) -> bool:
    from hmac import compare_digest

    return any(compare_digest(_digest(key, part), signature) for key in keys)


def _digest(key: bytes, part: bytes) -> bytes:
    from hmac import digest

    return digest(key, part, "sha256")


def _signed_part_of(job_id: str, result: bytes) -> bytes:
    whose = job_id.encode()
    mark = b"result"  # the signed part of a job begins with other bytes
    return mark + struct.pack(">I", len(whose)) + whose + result


def _signed_part(envelope: Envelope) -> bytes:
    planned = envelope.planned
    whose = (envelope.id if planned is None else planned.schedule).encode()
    task = envelope.task.encode()
    lengths = struct.pack(">III?", len(whose), len(task), len(envelope.body), envelope.pickled)
    mark = b"" if planned is None else b"schedule"  # no length begins with these bytes
    return mark + lengths + whose + task + envelope.body


class BodyTooLarge(InvalidOption):
    """A job is larger than stores accept."""


def check_size(body: bytes, headers: Mapping[str, str], tags: Sequence[str]) -> None:
    """Raise BodyTooLarge, which names the largest part, above ``MAX_BODY`` bytes in all."""
    beside = 0
    if headers or tags:
        texts = [*headers, *headers.values(), *tags]
        beside = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if len(body) + beside <= MAX_BODY:
        return
    if beside <= len(body):
        part = f"the body has {len(body):,} bytes"
    else:
        part = f"the headers and tags have {beside:,} bytes"
    raise BodyTooLarge(
        f"{part}, and body, headers and tags may have {MAX_BODY:,} bytes together; "
        "store large data elsewhere and pass its name"
    )
