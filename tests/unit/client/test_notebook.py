"""Handles in a notebook: tables that escape names, and never an error."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from tidemill import Tidemill
from tidemill.testing import run_all

BAD = "<b>&"


@pytest.fixture
def shop(mill: Tidemill) -> Tidemill:
    @mill.task(name=BAD, retries=0)
    def pay(value: str) -> str:
        if value == "no":
            raise ValueError(BAD)
        return value

    return mill


def test_a_job_is_a_table_of_its_state(shop: Tidemill) -> None:
    good = shop.enqueue(shop.tasks[BAD].call("yes"))
    bad = shop.enqueue(shop.tasks[BAD].call("no"))
    assert "ready" in good._repr_html_()
    run_all(shop)
    shown = good._repr_html_()
    assert "succeeded" in shown
    assert "&#x27;yes&#x27;" in shown
    assert "ValueError: &lt;b&gt;&amp;" in bad._repr_html_()
    for text in (shown, bad._repr_html_()):
        assert BAD not in text


def test_a_queue_is_a_table_of_numbers(mill: Tidemill) -> None:
    queue = mill.queue(BAD)
    queue.put("x")
    queue.pause()
    shown = queue._repr_html_()
    assert "&lt;b&gt;&amp; (paused)" in shown
    assert ">ready</th>" in shown
    assert BAD not in shown


def test_a_handle_without_its_job_is_a_text(mill: Tidemill) -> None:
    shown = mill.job("gone")._repr_html_()
    assert "no job has the id" in shown
    assert "<table>" not in shown


class Axes:
    """What a chart asks of matplotlib."""

    def __init__(self) -> None:
        self.lines: dict[str, list[int]] = {}
        self.figure = types.SimpleNamespace(autofmt_xdate=lambda: None)

    def plot(self, at: list[Any], values: list[int], *, label: str) -> None:
        assert len(at) == len(values)
        self.lines[label] = values

    def set(self, **settings: Any) -> None: ...
    def legend(self, **settings: Any) -> None: ...


def test_the_chart_of_a_queue_has_its_numbers(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", types.ModuleType("matplotlib.pyplot"))
    queue, axes = mill.queue("mail"), Axes()
    queue.put_many([1, 2, 3])
    assert queue.plot(ax=axes) is axes
    assert sum(axes.lines["accepted"]) == 3
