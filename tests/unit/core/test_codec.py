"""Bodies keep their types; nothing in the data runs; signatures hold."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import os
import pickle
import uuid
import zoneinfo
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext, encode

from tidemill.core.codec import (
    MAX_BODY,
    BodyTooLarge,
    check_size,
    pack,
    pack_pickle,
    sign,
    unpack,
    unpack_pickle,
    verify,
)
from tidemill.core.envelope import Envelope
from tidemill.errors import BadSignature, CodecError

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


def same(one: Any, two: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(one) is not type(two):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same(list(one), list(two)) and same(list(one.values()), list(two.values()))
    if isinstance(one, dt.datetime | dt.time):
        return one == two and one.tzinfo == two.tzinfo and one.fold == two.fold
    if isinstance(one, float | decimal.Decimal):
        return repr(one) == repr(two)
    return bool(one == two)


@pytest.mark.parametrize(
    "value",
    [
        1, 0, -1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**40, -(10**4999),
        "", "text", "\0", "ü€😀", b"", bytes(range(256)), None, True, False,
        0.0, -0.0, 1.5, float("inf"), float("nan"),
        [], [1, [2, [3]]], {}, {"a": {"b": [1, (2, {3})]}}, (), (1,), ((), ((),)),
        set(), {1, 2}, frozenset(), frozenset({(1, 2)}), {(1, 2): 3, 4: 5},
        {1: 2, None: 3, b"x": 4},
        {dt.date(2024, 2, 29): [uuid.UUID(int=7)], 2**70: 1},
        decimal.Decimal("1.10"), decimal.Decimal("-0"), decimal.Decimal("NaN"),
        decimal.Decimal("1E-999"), uuid.UUID(int=2**127 + 5),
        dt.datetime(2024, 5, 17, 12, 30, 15, 123456), dt.datetime(1, 1, 1), dt.datetime.max,
        dt.datetime(2024, 5, 17, tzinfo=dt.UTC),
        dt.datetime(2024, 5, 17, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=45))),
        dt.datetime(2024, 7, 17, tzinfo=BERLIN),
        dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN),
        dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
        dt.datetime(2024, 3, 31, 2, 30, tzinfo=BERLIN),
        dt.date(2024, 2, 29), dt.time(23, 59, 59, 999999), dt.time(12, tzinfo=BERLIN),
        dt.time(12, tzinfo=dt.UTC), dt.timedelta(days=-3, microseconds=1),
        dt.timedelta.max, dt.timedelta.min,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_every_type_comes_back_as_itself(value: Any) -> None:
    # case Q6, law 18
    assert same(unpack(pack(value)), value)
    assert same(unpack(pack([value, {"k": (value,)}])), [value, {"k": (value,)}])


keys = st.one_of(
    st.text(),
    st.integers(),
    st.binary(),
    st.none(),
    st.dates(),
    st.uuids(),
    st.tuples(st.integers()),
)
leaves = st.one_of(
    keys,
    st.booleans(),
    st.floats(),
    st.decimals(),
    st.datetimes(timezones=st.one_of(st.none(), st.timezones())),
    st.times(),
    st.timedeltas(),
    st.sets(st.integers()),
    st.frozensets(st.text()),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(keys, inner), st.lists(inner).map(tuple)
    ),
    max_leaves=12,
)


@settings(max_examples=int(os.environ.get("TIDEMILL_EXAMPLES", "150")), deadline=None)
@given(values)
def test_plain_data_survive_a_round_trip(value: Any) -> None:
    # case Q6
    assert same(unpack(pack(value)), value)


@settings(max_examples=int(os.environ.get("TIDEMILL_EXAMPLES", "150")), deadline=None)
@given(
    st.one_of(
        st.binary(), st.builds(lambda c, d: encode(Ext(c, d)), st.integers(-5, 20), st.binary())
    )
)
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    # law 16
    with contextlib.suppress(CodecError):
        unpack(data)


@pytest.mark.parametrize(
    "inner",
    [
        ["2024-01-01T00:00:00", 0, "No/Such"], ["2024-01-01T00:00:00", 0, "../../etc/passwd"],
        ["2024-01-01T00:00:00", 0, "Europe"], ["2024-01-01T00:00:00", 7, ""], [1, 2, 3], {}, 5,
    ],
)  # fmt: skip
@pytest.mark.parametrize("code", [6, 8])
def test_nonsense_in_an_extension_is_refused(code: int, inner: Any) -> None:
    # law 16
    with pytest.raises(CodecError):
        unpack(encode(Ext(code, encode(inner))))


@pytest.mark.parametrize("size", [1, 32])
def test_a_signature_that_is_cut_off_is_refused(size: int) -> None:
    # law 16
    with pytest.raises(CodecError):
        unpack((b"\xc1" + bytes(32))[:size])


def test_an_unknown_extension_is_named() -> None:
    with pytest.raises(CodecError, match="unknown extension type 99"):
        unpack(encode(Ext(99, b"")))


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Point(msgspec.Struct):
    x: int


@dataclasses.dataclass
class Circle:
    centre: Point
    colours: tuple[Colour, ...]


Pair = namedtuple("Pair", "a b")


def test_objects_travel_as_plain_data() -> None:
    # law 18: they become themselves again through annotations, not by a name in the data
    assert unpack(pack(Circle(Point(1), (Colour.RED,)))) == {
        "centre": {"x": 1},
        "colours": ("red",),
    }
    assert same(
        unpack(pack([Level.HIGH, Pair(1, 2), bytearray(b"x"), memoryview(b"y")])),
        [3, (1, 2), b"x", b"y"],
    )
    counts = defaultdict(int, a=1)
    assert same(unpack(pack([OrderedDict(b=1), counts])), [{"b": 1}, {"a": 1}])


class Lazy:
    """A proxy of a text, as ``SimpleLazyObject`` of Django."""

    __class__ = str  # type: ignore[assignment]

    def __str__(self) -> str:
        return "later"


def test_a_proxy_travels_as_the_value_that_it_stands_for() -> None:
    assert isinstance(Lazy(), str)
    assert unpack(pack([Lazy()])) == ["later"]


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, (n for n in ()), Circle, 1j, [{"a": object()}]]
)
def test_an_unencodable_value_is_named(value: Any) -> None:
    # case T20
    with pytest.raises(
        CodecError, match=r"cannot encode a .*(object|function|generator|type|complex)"
    ):
        pack(value)


def test_recursive_or_too_deep_values_are_refused() -> None:
    # case T20
    loop: list[Any] = []
    loop.append(loop)
    ring: dict[str, Any] = {}
    ring["a"] = (ring,)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (loop, ring, deep):
        with pytest.raises(CodecError, match="too deep"):
            pack(value)
    with pytest.raises(CodecError):
        unpack(b"\x91" * 100_000 + b"\x90")
    with pytest.raises(CodecError):
        pack("\ud800")


ran: list[str] = []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, ("boom",)


def test_a_pickle_bomb_does_nothing() -> None:
    # case T15, law 18, case S1
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        try:
            unpack(pickle.dumps(Bomb(), protocol))
        except CodecError:
            pass
    unpack(pack(pickle.dumps(Bomb())))
    assert ran == []


class Sulky:
    def __reduce__(self) -> Any:
        raise RuntimeError("I will not be pickled")


def test_pickle_is_used_on_request() -> None:
    assert unpack_pickle(pack_pickle({"c": 1j})) == {"c": 1j}
    with pytest.raises(CodecError, match="I will not be pickled"):
        pack_pickle(Sulky())
    with pytest.raises(CodecError, match="cannot unpickle"):
        unpack_pickle(b"no pickle")


def signed(key: bytes, **fields: Any) -> Envelope:
    envelope = Envelope(**{"id": "id", "task": "task", "body": b"body", **fields})
    envelope.signature = sign(envelope, key)
    return envelope


def test_a_signature_holds_for_id_task_and_body() -> None:
    # case T15, law 18, case S3
    envelope = signed(b"key")
    verify(envelope, [b"key"])
    for field, other in (("id", "other"), ("task", "other"), ("body", b"other"), ("pickled", True)):
        changed = msgspec.structs.replace(envelope, **{field: other})
        with pytest.raises(BadSignature, match="bad signature"):
            verify(changed, [b"key"])
    # what moves over a border is another job
    with pytest.raises(BadSignature):
        verify(msgspec.structs.replace(envelope, id="idt", task="ask"), [b"key"])


def test_keys_are_rotated_and_missing_signatures_refused() -> None:
    # case T15
    old = signed(b"old")
    verify(old, [b"new", b"old"])
    for envelope, keys in ((old, [b"new"]), (old, []), (Envelope(id="id"), [b"old"])):
        with pytest.raises(BadSignature, match="bad signature"):
            verify(envelope, keys)


def test_a_body_has_a_limit() -> None:
    check_size(b"x" * MAX_BODY, {}, [])
    with pytest.raises(BodyTooLarge, match=r"the body has 1,048,577 bytes, and .* 1,048,576"):
        check_size(b"x" * (MAX_BODY + 1), {}, [])
