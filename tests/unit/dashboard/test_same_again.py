"""The line of Python that puts the same job again runs as it is, with values of all types."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import uuid
import zoneinfo
from typing import Any

import pytest

from tidemill import Tidemill
from tidemill.core.codec import pack
from tidemill.core.envelope import Envelope
from tidemill.core.job import Record
from tidemill.dashboard.job import as_python

UTC = dt.datetime(2026, 3, 1, 9, 30, tzinfo=dt.UTC)
PARIS = zoneinfo.ZoneInfo("Europe/Paris")
VALUES = [
    UTC,
    UTC.replace(tzinfo=None, microsecond=7),
    UTC.astimezone(dt.timezone(dt.timedelta(hours=-3, minutes=-30))),
    dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=PARIS),
    dt.date(2026, 3, 1),
    dt.time(9, 30, tzinfo=PARIS),
    dt.timedelta(days=-1, seconds=5),
    decimal.Decimal("1.50"),
    uuid.UUID(int=7),
    math.inf,
    -math.inf,
    (),
    (UTC,),
    (1, [UTC, {"at": UTC}]),
    set(),
    {UTC},
    frozenset(),
    frozenset({uuid.UUID(int=1)}),
    {UTC: decimal.Decimal(1), 2: "x"},
    'it\'s\n"x"\\',
    b"\0\xff",
    None,
    True,
    -1.5,
]


def again(envelope: Envelope) -> str:
    return as_python(Record(envelope=envelope, state="ready", seq=1, rank=envelope.rank))  # type: ignore[arg-type]


class Puts:
    """Keeps the arguments of the line that is run."""

    def __init__(self) -> None:
        self.got: Any = None

    def call(self, task: str, *args: Any, **kwargs: Any) -> Puts:
        self.got = (task, args, kwargs)
        return self

    def using(self, **_: Any) -> Puts:
        return self

    def queue(self, _: str) -> Puts:
        return self

    def put(self, body: Any) -> None:
        self.got = body

    def enqueue(self, _: Puts) -> None:
        pass


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_line_gives_the_value_again(value: Any) -> None:
    body = pack(([value, [value]], {"at": value, "not a name": value, "class": value}))
    line, puts = again(Envelope(id="a", task="shop.pay", queue="q", body=body)), Puts()
    assert "\n" not in line
    exec(line, {"mill": puts})
    task, args, kwargs = puts.got
    assert (task, args) == ("shop.pay", (value, [value]))
    assert kwargs == {"at": value, "not a name": value, "class": value}
    assert type(args[0]) is type(value)
    if isinstance(value, dt.datetime):
        assert (args[0].tzinfo, args[0].fold) == (value.tzinfo, value.fold)


def test_a_line_gives_the_body_of_a_message_again() -> None:
    line, puts = again(Envelope(id="a", queue="q", body=pack({"at": UTC}))), Puts()
    assert line.startswith("import datetime; mill.queue('q').put(")
    exec(line, {"mill": puts})
    assert puts.got == {"at": UTC}


def test_a_line_without_such_values_imports_nothing(mill: Tidemill) -> None:
    line = again(Envelope(id="a", task="shop.pay", queue="q", body=pack(([1], {"to": "x"}))))
    assert line == "mill.enqueue(mill.call('shop.pay', 1, to='x').using(queue='q'))"
