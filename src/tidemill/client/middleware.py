"""Middleware: functions that wrap the run of every job.

A middleware has one of four forms. The first two serve sync and async tasks alike::

    def timed(context):                      # a generator: it yields once, and the job runs there
        start = time.perf_counter()
        try:
            yield
        finally:
            log.info("%s took %.3f s", context.task, time.perf_counter() - start)

    async def in_session(context):           # an async generator
        async with session() as context.state["session"]:
            yield

    def again(call_next, context):           # a function that calls call_next once or more
        return call_next()

    async def aagain(call_next, context):    # its async form, for async and sync tasks
        return await call_next()

The first middleware in the list is the outermost. A middleware may raise; ``raise Skip("why")``
ends the job as succeeded. ``yield`` returns the value of the task, or raises the exception of the
task. If a generator catches the exception, or returns before its ``yield``, its return value
becomes the result of the job. The return value of a function always becomes the result.

Only functions change a result. So once the outer layers are all generators, the result is final. If
it has no encoding, it is an exception there, and these generators hear of the failure.

In a plain function around an async task, ``call_next()`` returns an awaitable. Code after the call
runs before the task, so use a generator for such a task. Around a sync task, an async middleware
has an event loop of its own for the time of the job.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tidemill.client.context import JobContext
from tidemill.core.codec import NOT_ENCODED, pack_result
from tidemill.core.retry import Fail
from tidemill.errors import InvalidOption

Middleware = (
    Callable[[Callable[[], Any], JobContext], Any]
    | Callable[[JobContext], Iterator[Any]]
    | Callable[[JobContext], AsyncIterator[Any]]
)
"""A function around every job: see the four forms in :mod:`tidemill.client.middleware`."""

_FORMS = "it must be a function of (call_next, context), or a generator function of (context)"


class Form(enum.Enum):
    """How a middleware is put around a call."""

    GENERATOR = enum.auto()
    ASYNC_GENERATOR = enum.auto()
    COROUTINE_FUNCTION = enum.auto()
    FUNCTION = enum.auto()
    ENCODING = enum.auto()  # no middleware: the layer tries the encoding of the result


class Layer(NamedTuple):
    """A middleware and its form, which is checked once."""

    middleware: Any
    form: Form


_GENERATORS = (Form.GENERATOR, Form.ASYNC_GENERATOR)


def check_middleware(layers: Sequence[Any]) -> tuple[Layer, ...]:
    checked = tuple(map(_checked, layers))
    outer = tuple(itertools.takewhile(lambda layer: layer.form in _GENERATORS, checked))
    return (*outer, Layer(None, Form.ENCODING), *checked[len(outer) :]) if outer else checked


def _checked(layer: Any) -> Layer:
    if not callable(layer):
        raise InvalidOption(f"middleware: {layer!r} cannot be called; {_FORMS}")
    plain = inspect.isroutine(layer) or isinstance(layer, functools.partial)
    function = layer if plain else type(layer).__call__
    form = Form.FUNCTION
    if inspect.isgeneratorfunction(function):
        form = Form.GENERATOR
    elif inspect.isasyncgenfunction(function):
        form = Form.ASYNC_GENERATOR
    elif inspect.iscoroutinefunction(function):
        form = Form.COROUTINE_FUNCTION
    try:
        signature = inspect.signature(layer, follow_wrapped=False)
        signature.bind(*((None,) if form in _GENERATORS else (None, None)))
    except TypeError:
        raise InvalidOption(f"middleware: {layer!r} takes other arguments; {_FORMS}") from None
    except ValueError:  # a function in C shows no signature
        pass
    return Layer(layer, form)


def compose(
    layers: Sequence[Layer], call: Callable[[], Any], context: JobContext, awaits: bool
) -> Any:
    """Call through all layers, and return the value or an awaitable of it.

    ``awaits`` is True around an async task: ``call`` returns an awaitable.
    """
    for layer, form in reversed(layers):
        if form is Form.GENERATOR:
            call = functools.partial(_around_await if awaits else _around, layer, call, context)
        elif form is Form.ASYNC_GENERATOR:
            call, awaits = functools.partial(_async_around, layer, call, context), True
        elif form is Form.COROUTINE_FUNCTION:
            awaited = functools.partial(_awaited, call)
            call, awaits = functools.partial(layer, awaited, context), True
        elif form is Form.FUNCTION:
            call = functools.partial(layer, call, context)
        else:  # another try follows: a generator may change a mutable result
            call = functools.partial(_await_encodable if awaits else _call_encodable, call)
    return call()


def _call_encodable(call: Callable[[], Any]) -> Any:
    return _encodable(call())


async def _await_encodable(call: Callable[[], Any]) -> Any:
    return _encodable(await _awaited(call))


def _encodable(value: Any) -> Any:
    """The result, or the error of a result that has no encoding."""
    try:
        pack_result(value)
    except Exception as error:  # encoding may run the value's own code
        raise Fail(f"{NOT_ENCODED}: {type(error).__qualname__}: {error}") from error
    return value


async def _awaited(call: Callable[[], Any]) -> Any:
    value = call()
    return await value if inspect.isawaitable(value) else value


def _around(layer: Any, call: Callable[[], Any], context: JobContext) -> Any:
    steps = layer(context)
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    try:
        value = call()
    except BaseException as error:
        return _raised(steps, error)
    else:
        return _returned(steps, value)
    finally:
        steps.close()  # also if a timeout is raised between the lines above


async def _around_await(layer: Any, call: Callable[[], Any], context: JobContext) -> Any:
    steps = layer(context)
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    try:
        value = await _awaited(call)
    except BaseException as error:
        return _raised(steps, error)
    else:
        return _returned(steps, value)
    finally:
        steps.close()


def _returned(steps: Any, value: Any) -> Any:
    try:
        steps.send(value)
    except StopIteration:
        return value
    raise _second_yield(steps)


def _raised(steps: Any, error: BaseException) -> Any:
    """Raise the task's exception at the ``yield``; the generator may catch it."""
    try:
        steps.throw(error)
    except StopIteration as end:
        return end.value
    except RuntimeError as raised:  # a generator replaces its StopIteration by a RuntimeError
        if isinstance(error, StopIteration) and raised.__cause__ is error:
            raise error from None
        raise
    raise _second_yield(steps)


async def _async_around(layer: Any, call: Callable[[], Any], context: JobContext) -> Any:
    """Run an async generator around a call; an early end means the result None."""
    steps = layer(context)
    try:
        await anext(steps)
    except StopAsyncIteration:
        return None
    try:
        value = await _awaited(call)
    except BaseException as error:
        try:
            await steps.athrow(error)
        except StopAsyncIteration:
            return None
        except RuntimeError as raised:  # a generator replaces its StopAsyncIteration by this error
            if isinstance(error, StopAsyncIteration) and raised.__cause__ is error:
                raise error from None
            raise
        await steps.aclose()
        raise _second_yield(steps) from error
    try:
        await steps.asend(value)
    except StopAsyncIteration:
        return value
    await steps.aclose()
    raise _second_yield(steps)


def _second_yield(steps: Any) -> RuntimeError:
    if inspect.isgenerator(steps):
        steps.close()
    return RuntimeError(f"the middleware {steps.__qualname__} yields more than once")
