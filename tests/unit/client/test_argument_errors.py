"""Errors of arguments name the task, the argument and the remedy, before anything is stored."""

from __future__ import annotations

import dataclasses
import enum
import re
import typing
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from django.db.models import QuerySet
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy

from tidemill import Tidemill, chain, map_many
from tidemill.errors import CodecError

if TYPE_CHECKING:
    pass


class Color(enum.Enum):
    RED = "r"


class Status(enum.StrEnum):
    PAID = "paid"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int
    color: Color = Color.RED


@dataclasses.dataclass
class Dot(Point):
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Spot:
    x: int


@dataclasses.dataclass
class Loose:
    inner: Any


class Box(msgspec.Struct):
    name: str
    points: list[Point] = []


class Customer:
    """A model of an object-relational mapper, as SQLAlchemy makes them."""

    __tablename__ = "customers"


@dataclasses.dataclass
class Order:
    customer: Any


def bare(value, other=None):  # type: ignore[no-untyped-def]
    return value


def anything(value: Any, *rest: object, **named: Any) -> Any:
    return value


@pytest.fixture
def mill() -> Iterator[Tidemill]:
    with Tidemill("memory://") as mill:
        yield mill
        assert mill.jobs().page().records == []


# -- the call does not fit ------------------------------------------------------------------------


def test_a_call_that_does_not_fit_names_the_task_and_its_parameters(mill: Tidemill) -> None:
    @mill.task(name="shop.thumbnail")
    def thumbnail(path: str, width: int = 640) -> None: ...

    task: Any = thumbnail
    takes = re.escape("; task shop.thumbnail takes (path, width=640)")
    for call, error in (
        (lambda: task.enqueue(), "missing a required argument: 'path'"),
        (lambda: task.call(1, 2, 3), "too many positional arguments"),
        (lambda: task.call(1, heigth=3), "got an unexpected keyword argument 'heigth'"),
        (lambda: mill.enqueue("shop.thumbnail"), "missing a required argument: 'path'"),
    ):
        with pytest.raises(TypeError, match=f"^{error}{takes}$"):
            call()


@pytest.mark.parametrize("sync", [False, True])
def test_a_step_without_a_parameter_for_the_result_before_it_is_explained(sync: bool) -> None:
    mill = Tidemill("memory://", sync=sync)

    @mill.task(name="one")
    def one(number: int) -> int:
        return number

    @mill.task(name="shop.clean")
    def clean() -> None: ...

    takes = r"^too many positional arguments; task shop.clean takes \(\); "
    step = (
        r"a chain passes the previous result as the first argument: add a parameter for it, or use "
        r"a flow, flow.add\(clean.call\(…\), after=\[node\]\)$"
    )
    with pytest.raises(TypeError, match=takes + step):
        mill.enqueue(chain(one.call(1), clean.call()))
    with pytest.raises(TypeError, match=r"^too many .* one takes \(number\); a chain passes"):
        mill.enqueue(chain(one.call(1), one.call(2)))
    if not sync:  # there a failed hook is only logged
        with pytest.raises(TypeError, match=takes + "a hook gets an Ended as its first argument"):
            mill.enqueue(one.call(1).on_success(clean.call()))


# -- the value has no encoding --------------------------------------------------------------------


def whole(sentence: str) -> str:
    return f"^{re.escape(sentence)}"


def test_a_value_without_encoding_is_found_by_its_argument(mill: Tidemill) -> None:
    place = mill.task(name="shop.place")(anything)
    name = f"cannot encode a {__name__}.Customer: pass its key, and load the object in the task"
    orders = [{}, {}, {}, Order(Customer())]
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: place.enqueue(Customer()), "value"),
        (lambda: place.enqueue(value=Customer()), "value"),
        (lambda: place.enqueue(orders), "value[3].customer"),
        (lambda: place.enqueue({"a": (1, Customer())}), "value['a'][1]"),
        (lambda: place.enqueue({"a": {Customer()}}), "value['a']"),
        (lambda: place.enqueue(Box("b", [Customer()])), "value.points[0]"),  # type: ignore[list-item]
        (lambda: place.enqueue(1, 2, Customer()), "rest[1]"),
        (lambda: place.enqueue(1, who=Customer()), "who"),
        (lambda: mill.enqueue_many([place.call(1), place.call(Customer())]), "value"),
        (lambda: mill.enqueue(chain(place.call(1), place.call(Customer()))), "rest[0]"),
        (lambda: mill.enqueue(map_many(place, [1, Customer()])), "value"),
    ]
    for call, where in cases:
        with pytest.raises(CodecError, match=whole(f"argument {where} of task shop.place: {name}")):
            call()
    call = mill.call("app.other", 1, Customer()).using(queue="q")
    with pytest.raises(CodecError, match=whole(f"argument 2 of task app.other: {name}")):
        mill.enqueue(call)


def test_other_values_without_encoding_are_named_too(mill: Tidemill) -> None:
    task = mill.task(name="t")(anything)
    loop: list[Any] = []
    loop.append(loop)
    for value, said in (
        (object(), r"cannot encode a builtins.object: pass plain data.*register_converter"),
        (Point, "cannot encode a builtins.type: pass plain data"),
        (loop, "the value is nested too deeply, or contains itself"),
        ("\ud800", "cannot encode the value: .*surrogates"),
    ):
        with pytest.raises(CodecError, match=f"^argument value of task t: {said}"):
            task.enqueue(value)
    with pytest.raises(CodecError, match=r"^argument value\[0\] of task t: .*surrogates"):
        task.enqueue(["\ud800"])


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (gettext_lazy("Hello"), "str(value)"),
        (QuerySet(), "plain values, such as list(value.values_list('pk', flat=True))"),
        (SimpleLazyObject(Customer), "its key, and load the object in the task"),
    ],
    ids=["text", "rows", "row"],
)
def test_a_lazy_value_of_django_names_what_to_pass(mill: Tidemill, value: Any, advice: str) -> None:
    task = mill.task(name="t")(anything)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    sentence = f"argument value[0] of task t: cannot encode a {name}: pass {advice}"
    with pytest.raises(CodecError, match=f"{whole(sentence)}$"):
        task.enqueue([value])


def test_a_method_of_an_ordinary_class_says_what_to_do(mill: Tidemill) -> None:
    class Mailer:
        @mill.task(name="send")
        def send(self, to: str) -> str:
            return to

    mailer: Any = Mailer()
    assert mailer.send("a") == "a"
    with pytest.raises(CodecError, match=r"^argument self of task send: .*make the class a datacl"):
        mailer.send.enqueue("a")


# -- the value would arrive as another type -------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "where", "kind", "back", "plain"),
    [
        (Point(1), "", "Point", "dict", "dataclasses.asdict(value)"),
        (Color.RED, "", "Color", "str", "its .value"),
        (Status.PAID, "", "Status", "str", "its .value"),
        (Level.HIGH, "", "Level", "int", "its .value"),
        (Box("b"), "", "Box", "dict", "msgspec.to_builtins(value)"),
        ([1, Point(1)], "[1]", "Point", "dict", "dataclasses.asdict(value)"),
        ({"a": (Color.RED,)}, "['a'][0]", "Color", "str", "its .value"),
        ({Color.RED: 1}, "", "Color", "str", "its .value"),
        ({Color.RED}, "", "Color", "str", "its .value"),
    ],
)
@pytest.mark.parametrize("function", [bare, anything])
def test_a_typed_value_without_annotation_is_refused(
    mill: Tidemill,
    function: Callable[..., Any],
    value: Any,
    where: str,
    kind: str,
    back: str,
    plain: str,
) -> None:
    task = mill.task(name="t")(function)
    sentence = (
        f"argument value{where} of task t: a {__name__}.{kind} would arrive as a {back}; "
        f"annotate the parameter with the type, or pass plain data, such as {plain}"
    )
    for call in (lambda: task.enqueue(value), lambda: task.enqueue(value=value)):
        with pytest.raises(CodecError, match=f"{whole(sentence)}$"):
            call()


def test_a_typed_value_of_a_call_by_name_is_refused(mill: Tidemill) -> None:
    call = mill.call("app.other", Point(1)).using(queue="q")
    with pytest.raises(CodecError, match=r"^argument 1 of task app.other: .*another app's"):
        mill.enqueue(call)


def test_an_annotation_of_another_type_is_refused(mill: Tidemill) -> None:
    @mill.task(name="t")
    def take(
        point: Point | None = None, loose: Loose | None = None, either: Any | None = None
    ) -> None:
        """Its annotations name a base class, or leave the type of a part open."""

    for call, where, kind, back in (
        (lambda: take.enqueue(Dot(1)), "point", "Dot", "Point"),
        (lambda: take.enqueue(loose=Loose(Point(1))), "loose.inner", "Point", "dict"),
        (lambda: take.enqueue(either=Point(1)), "either", "Point", "dict"),
    ):
        with pytest.raises(CodecError, match=f"argument {where} .*{kind} would arrive as a {back}"):
            call()


def test_a_value_that_does_not_fit_its_own_class_is_refused(mill: Tidemill) -> None:
    @mill.task(name="t")
    def take(point: Point) -> None: ...

    with pytest.raises(TypeError, match=r"^task t: argument point: Expected `int`.*`\$\.x`"):
        take.enqueue(Point("many"))  # type: ignore[arg-type]


def test_a_set_whose_members_would_arrive_as_dicts_is_refused(mill: Tidemill) -> None:
    @mill.task(name="t")
    def take(spots: set[Spot]) -> None: ...

    with pytest.raises(CodecError, match=r"^argument spots of task t: .*; pass plain data$"):
        take.enqueue({Spot(1)})


class Paint(typing.TypedDict):
    color: Color


Shade = typing.NewType("Shade", Color)


def test_annotations_by_a_typed_dict_or_a_new_type_bring_types_back() -> None:
    mill = Tidemill("memory://", sync=True)

    @mill.task
    def kinds(paint: Paint, shade: Shade) -> list[str]:
        return [type(paint["color"]).__name__, type(shade).__name__]

    assert kinds.enqueue({"color": Color.RED}, Shade(Color.RED)).result() == ["Color", "Color"]
