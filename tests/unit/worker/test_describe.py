"""Errors of tasks as text: bounded, whatever the exception holds."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tidemill.core.retry import Retry
from tidemill.worker.verdicts import TRACEBACK_MOST, describe


def caught(error: BaseException) -> tuple[str, str]:
    try:
        raise error
    except BaseException as raised:
        return describe(raised)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


def test_a_large_error_becomes_a_short_text_with_both_ends_of_its_traceback() -> None:
    text, trace = caught(ValueError("x" * 100_000 + "the end"))
    assert len(text) <= 2_000
    assert len(trace) <= TRACEBACK_MOST + 10
    assert "in caught" in trace
    assert trace.endswith("the end\n")


def test_an_error_whose_text_raises_is_named() -> None:
    text, trace = caught(Unprintable())
    assert text.endswith("Unprintable: <its message cannot be printed: SystemExit>")
    assert "in caught" in trace


def test_an_ordinary_traceback_stays_whole() -> None:
    error = ValueError("second")
    error.__cause__ = KeyError("first")
    error.add_note("a note")
    text, trace = caught(error)
    assert text == "ValueError: second"
    assert "KeyError: 'first'" in trace
    assert "The above exception was the direct cause" in trace
    assert trace.endswith("ValueError: second\na note\n")


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
