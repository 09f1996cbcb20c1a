"""Exceptions, hooks and loggers of the task's own."""

from __future__ import annotations

import decimal
import gc
import logging
import logging.config
import sys
import threading
import warnings
import weakref
from typing import Any

from abuse.catalogue import End, fails, misdeed

_kept: list[Any] = []


class _Worst(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise _Worst("in __str__")

    __repr__ = __str__


class Finalized:
    def __del__(self) -> None:
        raise _Worst("in __del__")


class Odd(Exception):
    @property
    def __class__(self) -> Any:
        raise _Worst("in __class__")

    @property
    def __notes__(self) -> Any:
        raise _Worst("in __notes__")


class Slow(Exception):
    def __str__(self) -> str:
        sys.exit(1)


@misdeed("an exception whose `__str__` and `__repr__` raise", fails("Unprintable"))
def unprintable() -> None:
    raise Unprintable


@misdeed("an exception whose `__str__` calls `sys.exit()`", fails("Slow"))
def exits_in_str() -> None:
    raise Slow


@misdeed("an exception whose `__class__` and `__notes__` raise", fails("Odd"))
def odd_exception() -> None:
    raise Odd


@misdeed("an exception of `BaseException`", fails("_Worst"))
def base_exception() -> None:
    raise _Worst("of the task")


@misdeed("an exception class made in the task, with a name of 1 MB", fails("xxx"))
def long_name() -> None:
    raise type("x" * 1_000_000, (Exception,), {})


@misdeed("an exception group of everything", End("failed"))
def group() -> None:
    raise BaseExceptionGroup("all", [SystemExit(1), KeyboardInterrupt(), Unprintable()])


@misdeed("a `__del__` that raises", probe="")
def raises_in_del() -> None:
    Finalized()
    one, two = Finalized(), Finalized()
    one.other, two.other = two, one  # type: ignore[attr-defined]


@misdeed("a result whose encoding runs code that raises", fails("its result cannot be kept"))
def raises_in_result() -> Any:
    class Result(dict[str, Any]):
        def items(self) -> Any:
            raise _Worst("in items")

        __iter__ = keys = __len__ = items

    return Result(a=1)


@misdeed("a callback of a weak reference that raises")
def raises_in_callback() -> None:
    def callback(reference: object) -> None:
        raise _Worst("in a callback")

    one = Finalized()
    _kept.append(weakref.ref(one, callback))
    del one


def _hook(*args: Any, **options: Any) -> Any:
    raise _Worst("in a hook")


@misdeed("hooks for uncaught exceptions that raise")
def hooks_raise() -> None:
    sys.excepthook = threading.excepthook = sys.unraisablehook = _hook
    Finalized()


@misdeed("`sys.settrace` with a function that raises", fails("_Worst"))
def trace_raises() -> None:
    threading.settrace(_hook)
    sys.settrace(_hook)


@misdeed("`sys.setprofile` with a function that raises", fails("_Worst"))
def profile_raises() -> None:
    threading.setprofile(_hook)
    sys.setprofile(_hook)


@misdeed("a callback of the garbage collector that raises")
def collector_raises() -> None:
    gc.callbacks.append(_hook)
    gc.collect()


@misdeed("`gc.freeze()` and `gc.disable()`")
def collector_disabled() -> None:
    gc.freeze()
    gc.disable()


@misdeed("warnings as errors")
def warnings_as_errors() -> None:
    warnings.simplefilter("error")


class _Handler(logging.Handler):
    def handle(self, record: Any) -> Any:
        raise _Worst("in a log handler")


class _Filter(logging.Filter):
    def filter(self, record: Any) -> Any:
        raise _Worst("in a log filter")


@misdeed("a log handler that raises", fails("ValueError"))
def handler_raises() -> None:
    logging.getLogger().addHandler(_Handler())
    raise ValueError("so that the worker logs a line")


@misdeed("a log filter that raises", fails("ValueError"))
def filter_raises() -> None:
    logging.getLogger("tidemill.worker").addFilter(_Filter())
    raise ValueError("so that the worker logs a line")


@misdeed("a factory of log records that raises", fails("ValueError"))
def factory_raises() -> None:
    logging.setLogRecordFactory(_hook)
    raise ValueError("so that the worker logs a line")


@misdeed("`logging.shutdown()`", fails("ValueError"))
def logging_shut_down() -> None:
    logging.shutdown()
    raise ValueError("so that the worker logs a line")


@misdeed("`logging.config.dictConfig` that disables existing loggers", fails("ValueError"))
def logging_configured() -> None:
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})
    raise ValueError("so that the worker logs a line")


@misdeed("the handlers of the root logger closed and removed", fails("ValueError"))
def handlers_removed() -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    raise ValueError("so that the worker logs a line")


@misdeed("a decimal context that traps everything")
def decimal_context() -> None:
    context = decimal.getcontext()
    context.prec = 1
    for trap in context.traps:
        context.traps[trap] = True


@misdeed("junk in the locals of the thread")
def thread_locals() -> None:
    local = threading.local()
    local.junk = Finalized()
    _kept.append(local)
    threading.current_thread().name = "junk"
    threading.current_thread().__dict__["junk"] = Finalized()
