"""Values of classes that extend plain types arrive as themselves, or are refused."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from typing import Any

import pytest

from tidemill import Tidemill
from tidemill.errors import CodecError
from tidemill.testing import run_all


class Text(str):
    pass


class Number(int):
    pass


class Fraction(float):
    pass


class Raw(bytes):
    pass


class SafeText(str):
    """As the safe strings of Django and of markupsafe."""

    def __str__(self) -> str:
        return self

    def __html__(self) -> str:
        return self


class SafeRaw(bytes):
    def __bytes__(self) -> bytes:
        return self


class Doubled(int):
    """Its conversion differs."""

    def __int__(self) -> int:
        return self * 2


class Secret(str):
    def __str__(self) -> str:
        return "***"


class Names(list[Any]):
    pass


class Pair(tuple[int, int]):
    pass


class Bag(set[int]):
    pass


class Settings(dict[str, int]):
    pass


class Once(dict[str, int]):
    """Its copy differs."""

    def __init__(self, start: Any = ()) -> None:
        super().__init__(start, pieces=len(start))


class Shade(enum.Enum):
    LIGHT = "light"
    DARK = "dark"


class Moment(dt.datetime):
    pass


class Money(decimal.Decimal):
    pass


class Key(uuid.UUID):
    pass


class Span(dt.timedelta):
    pass


MADE = [
    *(collections.Counter("aab"), collections.OrderedDict(b=1, a=2), bytearray(b"ab")),
    *(memoryview(b"ab"), Text("t"), Number(3), Fraction(1.5), Raw(b"r"), Names(["a"])),
    *(Pair((1, 2)), Bag({1, 2}), Settings(a=1), Names([float("nan")])),
    *(SafeText("<b>"), SafeRaw(b"r"), Doubled(3), Secret("key")),
]
NOT_MADE = [
    *(collections.defaultdict(list, a=[1]), Once(), Moment(2026, 1, 1), Money("1.5")),
    *(Key(int=3), Span(1)),
]
ASKED_FOR = [
    *(Text("t"), Number(3), Fraction(1.5), Raw(b"r"), Moment(2026, 1, 1), Money("1.5")),
    *(SafeText("<b>"), SafeRaw(b"r"), Doubled(3), Secret("key")),
]


def kind(value: object) -> str:
    return type(value).__name__


def echo(mill: Tidemill, annotation: Any) -> Any:
    def function(x: Any) -> Any:
        return [type(x).__name__, x]

    if annotation is not None:
        function.__annotations__ = {"x": annotation}
    return mill.task(name="echo", retries=0)(function)


@pytest.mark.parametrize("value", MADE, ids=kind)
def test_an_annotation_restores_a_class_that_extends_a_plain_type(
    mill: Tidemill, value: Any
) -> None:  # case M8
    for annotation in (type(value), type(value) | None):
        job = echo(mill, annotation).enqueue(value)
        run_all(mill)
        assert job.result(timeout=0)[0] == type(value).__name__
        mill.tasks.clear()


@pytest.mark.parametrize("value", [*MADE, *NOT_MADE], ids=kind)
def test_a_value_that_would_arrive_as_another_type_is_refused(
    mill: Tidemill, value: Any
) -> None:  # case M8
    for place in (value, [value], {"k": (value,)}):
        with pytest.raises(CodecError, match=rf"a \S*{kind(value)} would arrive as a "):
            echo(mill, None).enqueue(place)
        with pytest.raises(CodecError, match=rf"a \S*{kind(value)} would arrive as a "):
            mill.enqueue(mill.call("elsewhere", place).using(queue="q"))
        mill.tasks.clear()


@pytest.mark.parametrize("value", NOT_MADE, ids=kind)
def test_a_class_that_no_data_make_is_refused_with_its_annotation_too(
    mill: Tidemill, value: Any
) -> None:  # case M8
    with pytest.raises(CodecError, match="would"):
        echo(mill, type(value)).enqueue(value)


@pytest.mark.parametrize("value", ASKED_FOR, ids=kind)
def test_a_parameter_may_ask_for_the_plain_text_or_number(mill: Tidemill, value: Any) -> None:
    plain = type(value).__mro__[1]
    job = echo(mill, plain).enqueue(value)
    run_all(mill)
    assert job.result(timeout=0) == [plain.__name__, value]


def test_a_safe_text_is_made_plain_by_the_annotation_that_the_error_names(mill: Tidemill) -> None:
    said = r"annotate .*, or pass plain data, such as str.__str__\(value\)"
    with pytest.raises(CodecError, match=said):
        echo(mill, None).enqueue(SafeText("<b>"))


def test_a_result_may_be_a_safe_text(mill: Tidemill) -> None:
    @mill.task
    def render() -> Any:
        return SafeText("<b>"), {SafeText("k"): SafeRaw(b"r")}

    job = render.enqueue()
    run_all(mill)
    text, parts = result = job.result(timeout=0)
    assert result == ("<b>", {"k": b"r"})
    assert [*map(type, (text, *parts, *parts.values()))] == [str, str, bytes]


def test_a_field_of_a_dataclass_restores_such_a_class(mill: Tidemill) -> None:  # case M8
    @dataclasses.dataclass
    class Report:
        words: collections.Counter[str]
        title: str

    job = echo(mill, Report).enqueue(Report(collections.Counter("aab"), Text("t")))
    run_all(mill)
    assert job.result(timeout=0)[1] == {"words": {"a": 2, "b": 1}, "title": "t"}


def test_the_members_of_a_set_are_restored_one_by_one(mill: Tidemill) -> None:  # case M8
    for annotation, value in (
        (set[Shade | float], {Shade.LIGHT, Shade.DARK, float("nan")}),
        (set[Shade], [Shade.LIGHT, Shade.DARK, Shade.LIGHT]),
    ):
        job = echo(mill, annotation).enqueue(value)
        run_all(mill)
        assert job.result(timeout=0)[0] == "set"
        mill.tasks.clear()
    with pytest.raises(
        CodecError, match=r"^argument x\[1\]\[0\] of task echo: a \S*Text would arrive as"
    ):
        echo(mill, None).enqueue(({1}, {(Text("a"),), ("b",)}))


def test_a_result_comes_back_as_its_annotation_says(mill: Tidemill) -> None:  # case M8
    @mill.task
    def count(text: str) -> collections.Counter[str]:
        return collections.Counter(text)

    job = count.enqueue("aab")
    run_all(mill)
    assert type(job.result(timeout=0)) is collections.Counter


@pytest.mark.parametrize(
    "annotation", [[str], {str}, {str: int}, (str, [int]), (str, int), any, 5], ids=repr
)
def test_an_annotation_that_is_no_type_is_ignored(mill: Tidemill, annotation: Any) -> None:
    def function(x: Any, *rest: Any, **others: Any) -> Any:
        return [x, *rest, *others.values()]

    function.__annotations__ = dict.fromkeys(["x", "rest", "others", "return"], annotation)
    job: Any = mill.task(name="echo", retries=0)(function).enqueue("a", 1, y={2})
    run_all(mill)
    assert job.result(timeout=0) == ["a", 1, {2}]
    with pytest.raises(CodecError, match="would arrive as a list"):
        mill.tasks["echo"].enqueue(Names())


def test_an_argument_may_be_named_self(mill: Tidemill) -> None:  # case M8
    @mill.task(name="selfish")
    def selfish(self: int, task: int, call: int, args: int) -> list[int]:
        return [self, task, call, args]

    @mill.task(name="async_selfish")
    async def async_selfish(self: int) -> int:
        return self

    named = {"self": 1, "task": 2, "call": 3, "args": 4}
    assert selfish(**named) == [1, 2, 3, 4]
    jobs: list[Any] = [
        selfish.enqueue(**named),
        selfish.using(priority=1).enqueue(**named),
        mill.enqueue(selfish.call(**named)),
        mill.enqueue("selfish", **named),
        mill.enqueue(mill.call("selfish", **named)),
    ]
    single = async_selfish.enqueue(self=5)
    run_all(mill)
    assert [job.result(timeout=0) for job in jobs] == [[1, 2, 3, 4]] * 5
    assert single.result(timeout=0) == 5
