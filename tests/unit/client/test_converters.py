"""Values of other libraries and of registered types travel as plain data, and come back typed."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pydantic
import pytest

from tidemill import InvalidOption, JobFailed, Tidemill, register_converter
from tidemill.core.codec import pack, unpack
from tidemill.errors import CodecError
from tidemill.testing import run_all


class Money:
    def __init__(self, amount: decimal.Decimal, currency: str) -> None:
        self.amount, self.currency = amount, currency

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(self.currency)


register_converter(Money, to=lambda m: [m.amount, m.currency], back=lambda data: Money(*data))


class Broken:
    pass


def fail(_: object) -> Any:
    raise KeyError("broken")


register_converter(Broken, to=fail, back=fail)


class Line(pydantic.BaseModel):
    price: decimal.Decimal
    model_config = pydantic.ConfigDict(extra="forbid")

    @pydantic.computed_field
    def double(self) -> decimal.Decimal:
        return 2 * self.price


class Order(pydantic.BaseModel):
    id: int = pydantic.Field(alias="orderId")
    placed: dt.datetime
    lines: tuple[Line, ...] = ()


class Link(pydantic.BaseModel):
    url: pydantic.HttpUrl


class Login(pydantic.BaseModel):
    password: pydantic.SecretStr


@dataclasses.dataclass
class Invoice:
    order: Order
    total: Money


ORDER = Order(
    orderId=7,
    placed=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    lines=(Line(price=decimal.Decimal("1.10")),),
)
MONEY = Money(decimal.Decimal("5.00"), "EUR")


@pytest.fixture
def mill() -> Iterator[Tidemill]:
    with Tidemill("memory://") as mill:
        yield mill


# -- registered converters ------------------------------------------------------------------------


def test_a_registered_type_comes_back_as_the_annotation_names_it(mill: Tidemill) -> None:
    got: list[Any] = []

    @mill.task
    def take(one: Money, more: dict[str, list[Money]], none: Money | None = None) -> Money:
        got.extend([one, more, none])
        return one

    job = take.enqueue(MONEY, {"a": [MONEY]})
    run_all(mill)
    assert job.error == ""
    assert got == [MONEY, {"a": [MONEY]}, None]
    assert job.result() == MONEY
    assert job.record.result == [decimal.Decimal("5.00"), "EUR"]  # law 18


def test_a_converter_that_fails_is_named(mill: Tidemill) -> None:
    @mill.task
    def take(value: Broken) -> None: ...

    with pytest.raises(CodecError, match=r"the converter of .*Broken failed: KeyError: 'broken'"):
        take.enqueue(Broken())
    job = take.enqueue("data")  # type: ignore[arg-type]
    run_all(mill)
    with pytest.raises(JobFailed, match=r"argument value: KeyError: 'broken'"):
        job.result()


def test_a_converter_is_refused_where_none_is_needed() -> None:
    for kind in (int, list, dt.datetime, Invoice):
        with pytest.raises(InvalidOption, match="needs no converter"):
            register_converter(kind, to=str, back=fail)
    with pytest.raises(InvalidOption, match="takes a type, not 5"):
        register_converter(5, to=str, back=fail)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=r"to and back .* must be functions"):
        register_converter(Link, to=None, back=fail)  # type: ignore[arg-type]


# -- pydantic -------------------------------------------------------------------------------------


def test_a_model_comes_back_as_the_annotation_names_it(mill: Tidemill) -> None:
    got: list[Any] = []

    @mill.task
    def take(order: Order, invoice: Invoice, links: list[Link], maybe: Order | None) -> Order:
        got.extend([order, invoice, links, maybe])
        return order

    given: Any = (ORDER, Invoice(ORDER, MONEY), [Link(url="https://a.example/")], ORDER)  # type: ignore[arg-type]
    job = take.enqueue(*given)
    run_all(mill)
    assert job.error == ""
    assert got == [*given]
    assert job.result() == ORDER


def test_plain_data_for_a_model_are_validated(mill: Tidemill) -> None:
    got: list[Any] = []

    @mill.task
    def take(line: Line) -> None:
        got.append(line)

    task: Any = take
    job, bad = task.enqueue({"price": "1.5"}), task.enqueue({"price": "much"})
    run_all(mill)
    assert (job.error, got) == ("", [Line(price=decimal.Decimal("1.5"))])
    with pytest.raises(JobFailed, match=r"argument line: price: Input should be a valid decimal"):
        bad.result()


def test_a_model_with_a_field_that_cannot_travel_is_refused(mill: Tidemill) -> None:
    class Holder(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        thing: Broken

    @mill.task(name="t")
    def take(login: Login | None = None, holder: Any = None) -> None: ...

    with pytest.raises(CodecError, match=r"argument login of task t: .*a secret"):
        take.enqueue(Login(password="x"))  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=r"argument holder of task t: .*Broken"):
        take.enqueue(holder=Holder(thing=Broken()))


def test_a_returned_model_is_stored_as_plain_data(mill: Tidemill) -> None:
    @mill.task(name="give")
    def give() -> Any:
        return [ORDER]

    job = give.enqueue()
    run_all(mill)
    assert job.result() == [
        {"id": 7, "placed": ORDER.placed, "lines": ({"price": decimal.Decimal("1.10")},)}
    ]


# -- numpy ----------------------------------------------------------------------------------------

ARRAYS = [
    np.array([[1.5, 2.5], [3.5, 4.5]]),
    np.array([1, 2, 3], dtype=">i2"),
    np.array(5),
    np.zeros((0, 3), dtype=np.float32),
    np.array(["2026-01-01"], dtype="M8[ns]"),
    np.array(["ä", "bc"]),
    np.array([True, False]),
    np.arange(6).reshape(2, 3).T,
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_an_array_comes_back_with_its_type_and_shape(mill: Tidemill, array: Any) -> None:
    @mill.task
    def take(array: np.ndarray, more: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:  # type: ignore[type-arg]
        assert (array == more[0]).all()
        array[...] = array  # it may be changed
        return array

    job = take.enqueue(array, [array])
    run_all(mill)
    back = job.result()
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()
    assert unpack(pack(array)).keys() == {"dtype", "shape", "data"}


def test_numbers_of_numpy_are_numbers(mill: Tidemill) -> None:
    got: list[Any] = []

    @mill.task(name="take")
    def take(value: Any, count: int, exact: np.int64) -> None:
        got.extend([value, count, exact])

    given: Any = ([np.int64(3), np.float64("nan"), np.bool_(True)], np.int32(5), np.int64(2**40))
    job = take.enqueue(*given)
    run_all(mill)
    assert job.error == ""
    assert [type(value) for value in got[0]] == [int, float, bool]
    assert [type(value) for value in got[1:]] == [int, np.int64]
    assert got[1:] == [5, 2**40]


def test_arrays_that_cannot_come_back_are_refused(mill: Tidemill) -> None:
    @mill.task(name="t")
    def take(array: Any = None, typed: npt.NDArray[Any] | None = None) -> None: ...

    for kwargs, said in (
        ({"array": np.arange(3)}, r"argument array .*would arrive as a dict; .*value.tolist\(\)"),
        ({"typed": np.array([object()])}, r"argument typed .*dtype object: pass array.tolist"),
        ({"typed": np.zeros(2, dtype="i4,f8")}, r"dtype \[.*: pass array.tolist\(\)"),
        ({"array": np.datetime64("2026-01-01")}, r"datetime64: pass value.item\(\) or value"),
        ({"array": np.longdouble(1)}, r"longdouble: pass value.item\(\) or value"),
    ):
        with pytest.raises(CodecError, match=said):
            take.enqueue(**kwargs)  # type: ignore[arg-type]
    job = take.enqueue(typed={"dtype": "O", "shape": [1], "data": b"12345678"})  # type: ignore[arg-type]
    run_all(mill)
    with pytest.raises(JobFailed, match="an array of dtype object is not accepted"):
        job.result()


# -- neither is needed ----------------------------------------------------------------------------


def test_neither_library_is_imported_by_tidemill() -> None:
    code = (
        "import sys, dataclasses\n"
        "from tidemill import Tidemill\n"
        "from tidemill.testing import run_all\n"
        "@dataclasses.dataclass\n"
        "class Point:\n    x: int\n"
        "mill = Tidemill('memory://')\n"
        "@mill.task\n"
        "def take(point: Point) -> Point: return point\n"
        "job = take.enqueue(Point(1)); run_all(mill); assert job.result() == Point(1)\n"
        "print([name for name in ('pydantic', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
