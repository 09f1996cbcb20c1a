"""The four forms of middleware, around sync and async tasks."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tidemill import Fail, InvalidOption, JobContext, State, Tidemill, this_job
from tidemill.core.envelope import Envelope
from tidemill.testing import run_all

Seen = list[str]


def generator(seen: Seen) -> Any:
    def around(context: JobContext) -> Iterator[Any]:
        seen.append("before")
        try:
            value = yield
            seen.append(f"returned {value}")
        except ValueError as error:
            seen.append(f"raised {error}")
            raise
        finally:
            seen.append("after")

    return around


def async_generator(seen: Seen) -> Any:
    async def around(context: JobContext) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        seen.append("before")
        try:
            value = yield
            seen.append(f"returned {value}")
        except ValueError as error:
            seen.append(f"raised {error}")
            raise
        finally:
            seen.append("after")

    return around


def coroutine(seen: Seen) -> Any:
    async def around(call_next: Callable[[], Any], context: JobContext) -> Any:
        seen.append("before")
        try:
            value = await call_next()
            seen.append(f"returned {value}")
            return value
        except ValueError as error:
            seen.append(f"raised {error}")
            raise
        finally:
            seen.append("after")

    return around


class WithCall:
    def __init__(self, seen: Seen) -> None:
        self.inner = generator(seen)

    def __call__(self, context: JobContext) -> Iterator[Any]:
        value = yield from self.inner(context)
        return value


def partial(seen: Seen) -> Any:
    def around(seen: Seen, context: JobContext) -> Iterator[Any]:
        yield from generator(seen)(context)

    return functools.partial(around, seen)


def tasks(*layers: Any) -> dict[str, Any]:
    mill = Tidemill("memory://", sync=True, middleware=layers)

    @mill.task(name="plain")
    def plain(value: int) -> int:
        if value < 0:
            raise ValueError("negative")
        return value

    @mill.task(name="waits")
    async def waits(value: int) -> int:
        await asyncio.sleep(0.01)
        return plain(value)

    return {"sync": plain, "async": waits}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("form", [generator, async_generator, coroutine, WithCall, partial])
def test_code_before_and_after_a_task_sees_its_end(form: Any, kind: str) -> None:
    seen = Seen()
    task = tasks(form(seen))[kind]

    assert task.enqueue(3).result() == 3
    with pytest.raises(ValueError, match="negative"):
        task.enqueue(-1)

    assert seen == ["before", "returned 3", "after", "before", "raised negative", "after"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_layers_of_all_forms_nest_in_their_order(kind: str) -> None:
    outer, middle, inner, innermost = Seen(), Seen(), Seen(), Seen()
    layers = generator(outer), coroutine(middle), async_generator(inner), generator(innermost)
    task = tasks(*layers)[kind]

    assert task.enqueue(3).result() == 3

    assert outer == middle == inner == innermost == ["before", "returned 3", "after"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_generator_may_catch_the_exception_and_give_the_result(kind: str) -> None:
    def saves(context: JobContext) -> Iterator[Any]:
        try:
            yield
        except ValueError:
            return "saved"

    assert tasks(saves)[kind].enqueue(-1).result() == "saved"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_generators_hear_of_a_result_that_cannot_be_kept(kind: str) -> None:
    outer, inner = Seen(), Seen()

    def told(context: JobContext) -> Iterator[Any]:
        try:
            yield
        except Fail as error:
            outer.append(str(error))
            raise

    mill = Tidemill("memory://", middleware=[told, coroutine(inner)])

    def plain() -> object:
        return object()

    async def waits() -> object:
        return object()

    job = mill.task({"sync": plain, "async": waits}[kind], name=kind).enqueue()
    run_all(mill)

    assert (job.state, len(job.attempts)) == (State.FAILED, 1)
    assert "its result cannot be kept: CodecError" in job.error
    assert outer == [job.error.removeprefix("Fail: ")]
    assert inner[1].startswith("returned <object")
    assert mill.middleware[0] is told
    assert len(mill.middleware) == 2
    mill.close()


@dataclasses.dataclass
class Size:
    width: int


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("inline", [True, False])
def test_a_middleware_and_the_task_see_the_arguments_of_the_function(
    kind: str, inline: bool
) -> None:
    seen: list[Any] = []

    def look(context: JobContext) -> None:
        seen.append((context.args, dict(context.kwargs)))

    def looks(context: JobContext) -> Iterator[Any]:
        look(context)
        yield

    def plain(size: Size, *, name: str) -> None:
        look(this_job())

    async def waits(size: Size, *, name: str) -> None:
        look(this_job())

    for layers in ([looks], []):
        mill = Tidemill("memory://", sync=inline, middleware=layers)
        mill.task({"sync": plain, "async": waits}[kind], name=kind).enqueue(Size(3), name="a")
        if not inline:
            run_all(mill)
        mill.close()

    assert seen == [((Size(3),), {"name": "a"})] * 3


def test_the_arguments_of_a_job_are_empty_before_it_has_them_and_cannot_be_changed() -> None:
    context = JobContext(Envelope(id="a", task="t"), 1)
    assert (context.args, dict(context.kwargs)) == ((), {})
    with pytest.raises(TypeError):
        context.kwargs["name"] = "b"  # type: ignore[index]


def test_a_function_may_turn_a_result_into_plain_data() -> None:
    def outer(context: JobContext) -> Iterator[Any]:
        yield

    def as_text(call_next: Callable[[], Any], context: JobContext) -> Any:
        return str(call_next())

    def opaque() -> object:
        return object()

    mill = Tidemill("memory://", sync=True, middleware=[outer, as_text])
    assert str(mill.task(opaque).enqueue().result()).startswith("<object")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_generator_that_ends_before_its_yield_keeps_the_task_from_running(kind: str) -> None:
    def cached(context: JobContext) -> Iterator[Any]:
        return "from the cache"
        yield

    async def closed(context: JobContext) -> AsyncIterator[Any]:
        return
        yield

    assert tasks(cached)[kind].enqueue(-1).result() == "from the cache"
    assert tasks(closed)[kind].enqueue(-1).result() is None


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("value", [1, -1])
def test_a_second_yield_is_an_error_that_names_the_middleware(kind: str, value: int) -> None:
    def twice(context: JobContext) -> Iterator[Any]:
        try:
            yield
        except ValueError:
            pass
        yield

    async def async_twice(context: JobContext) -> AsyncIterator[Any]:
        try:
            yield
        except ValueError:
            pass
        yield

    for layer in (twice, async_twice):
        with pytest.raises(RuntimeError, match=f"{layer.__name__} yields more than once"):
            tasks(layer)[kind].enqueue(value)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_context_variable_of_a_middleware_reaches_the_task_and_no_other_job(kind: str) -> None:
    tenant = contextvars.ContextVar("tenant", default="nobody")

    def enters(context: JobContext) -> Iterator[Any]:
        tenant.set(context.headers.get("tenant", "nobody"))
        yield

    mill = Tidemill("memory://", sync=True, middleware=[enters])

    @mill.task(name="sync")
    def plain() -> str:
        return tenant.get()

    @mill.task(name="async")
    async def waits() -> str:
        await asyncio.sleep(0)
        return tenant.get()

    task = {"sync": plain, "async": waits}[kind]
    assert task.using(headers={"tenant": "acme"}).enqueue().result() == "acme"
    assert task.enqueue().result() == "nobody"
    assert tenant.get() == "nobody"


@pytest.mark.parametrize("layer", [3, lambda: None, lambda one, two, three: None, object()])
def test_a_wrong_middleware_is_refused_at_once(layer: Any) -> None:
    with pytest.raises(InvalidOption, match=r"middleware: .*\(call_next, context\)"):
        Tidemill("memory://", middleware=[layer])


def test_a_decorated_function_is_judged_by_its_own_parameters() -> None:
    def with_table(inner: Any) -> Any:
        @functools.wraps(inner)
        def around(call_next: Callable[[], Any], context: JobContext) -> Any:
            return inner("table", call_next, context)

        return around

    @with_table
    def logs(table: str, call_next: Callable[[], Any], context: JobContext) -> Any:
        return f"{table} {call_next()}"

    assert tasks(logs)["sync"].enqueue(3).result() == "table 3"
