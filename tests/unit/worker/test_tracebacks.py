"""Errors of tasks as text: bounded, whatever the exception holds."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from tidemill.core.retry import Retry
from tidemill.worker.tracebacks import TRACEBACK_MOST
from tidemill.worker.verdicts import describe


def caught(error: BaseException) -> tuple[str, str]:
    try:
        raise error
    except BaseException as raised:
        return describe(raised)


def chain(length: int) -> BaseException:
    error: BaseException | None = None
    for number in range(length):
        following = ValueError(number)
        following.__cause__ = error
        error = following
    assert error is not None
    return error


def group(depth: int) -> BaseException:
    error: Exception = ValueError("innermost")
    for _ in range(depth):
        error = ExceptionGroup("group", [error])
    return error


def noted(size: int) -> BaseException:
    error = ValueError("short")
    error.add_note("a line\n" * size)
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 80_000_000),
        ValueError("\udcff\x00\n" * 20_000_000),
        noted(10_000_000),
        chain(5_000),
        group(2_000),
        type("x" * 1_000_000, (Exception,), {})(),
    ],
    ids=["long", "many lines", "long note", "chain", "deep group", "long name"],
)
def test_a_huge_error_becomes_a_short_text_at_once(error: BaseException) -> None:
    # given an error whose whole text takes many seconds to format
    began = time.process_time()
    # when it is described
    text, trace = caught(error)
    # then the text is short, and was made without formatting the whole
    assert time.process_time() - began < 2
    assert len(text) <= 2_000
    assert 0 < len(trace) <= TRACEBACK_MOST


def test_an_ordinary_traceback_stays_whole() -> None:
    error = ValueError("second")
    error.__cause__ = KeyError("first")
    error.add_note("a note")
    text, trace = caught(error)
    assert text == "ValueError: second"
    assert "KeyError: 'first'" in trace
    assert "The above exception was the direct cause" in trace
    assert trace.endswith("ValueError: second\na note\n")


class Strange(Exception):
    __module__ = 5  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no"), "ValueError: no"),
        (subprocess.CalledProcessError(1, "x"), "subprocess.CalledProcessError: Command"),
        (Retry("later"), "Retry: later"),
        (type("Own", (Exception,), {"__module__": "__main__"})("no"), "Own: no"),
        (
            type("RateLimited", (Exception,), {"__module__": "shop.errors"})(),
            "shop.errors.RateLimited",
        ),
        (Strange("no"), "Strange: no"),
    ],
)
def test_an_error_names_its_qualified_class(error: BaseException, expected: str) -> None:
    text, _ = caught(error)
    assert text.startswith(expected)


@pytest.mark.parametrize("module", ["tidemill.otel", "tidemill.django.connections"])
def test_a_traceback_begins_in_the_task(module: str) -> None:
    # given a module of tidemill that calls the task
    between: dict[str, Any] = {"__name__": module}
    exec("def around(task): task()", between)

    def task() -> None:
        raise ValueError("no")

    # when the task raises
    with pytest.raises(ValueError, match="no") as raised:
        between["around"](task)
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)  # type: ignore[union-attr]
    # then its traceback shows the task alone
    _, trace = describe(error)
    assert "in task" in trace
    assert "in around" not in trace
