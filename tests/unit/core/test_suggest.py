"""Errors about wrong names suggest a name that exists, also for an option of another queue."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tidemill import InvalidOption, Tidemill
from tidemill.client.options import CALL_OPTIONS, TASK_OPTIONS
from tidemill.client.task import AsyncTask
from tidemill.core.suggest import _BY_NAME, _METHOD_BY_NAME, did_you_mean, hint


def test_the_nearest_name_is_suggested() -> None:
    assert did_you_mean("quue", ["queue", "task"]) == "did you mean 'queue'?"
    assert did_you_mean("colour", ["queue", "task"]) == ""


def test_without_a_near_name_the_first_known_names_are_listed() -> None:
    assert hint("colour", ["task", "queue"]) == "known are queue, task"
    assert hint("colour", []) == "known are none"
    many = hint("colour", [f"q{n:02}" for n in range(30)])
    assert many.endswith("q18, q19, …")


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill("memory://")


def send(to: str, *, subject: str = "") -> str:
    return to


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("countdown", "delay="),
        ("eta", "at="),
        ("max_retries", "retries="),
        ("autoretry_for", r"retries=Retries\(3, on="),
        ("throws", "expects="),
        ("time_limit", "timeout="),
        ("task_id", "id="),
        ("bind", r"this_job\(\)"),
        ("acks_late", "nothing: a killed worker loses no job"),
        ("ignore_result", "nothing, or result_ttl=0, which deletes a succeeded job at once"),
    ],
)
def test_an_option_of_another_queue_names_ours(mill: Tidemill, name: str, here: str) -> None:
    with pytest.raises(InvalidOption, match=rf"unknown option '{name}' .*; write {here}"):
        mill.task(send).using(**{name: 5})


def test_the_url_stands_for_broker_and_backend() -> None:
    given: Any = {"result_backend": "redis://localhost"}
    with pytest.raises(InvalidOption, match=r"of Tidemill; write Tidemill\('redis://…'\)"):
        Tidemill(**given)


def test_an_option_among_the_arguments_is_shown_its_place(mill: Tidemill) -> None:
    task: Any = mill.task(send)
    for name, here in (("delay", "delay"), ("countdown", "delay"), ("eta", "at")):
        with pytest.raises(TypeError, match=rf"'{name}'; .*send\.using\({here}=…\)\.enqueue"):
            task.enqueue("a", **{name: 5})
    with pytest.raises(TypeError, match=r"'nonsense'; task .*send takes \(to, \*, subject=''\)$"):
        task.enqueue("a", nonsense=5)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("delay", "task.enqueue(…)"),
        ("apply_async", "task.using(delay=5).enqueue(…)"),
        ("s", "task.call(…)"),
        ("si", "task.call(…), or in a chain a flow: flow.add(task.call(…), after=[node])"),
        ("send", "task.enqueue(…)"),
    ],
)
def test_a_method_of_another_queue_names_ours(mill: Tidemill, name: str, here: str) -> None:
    task: Any = mill.task(send)
    for one in (task, task.using(priority=1)):
        said = f"{type(one).__name__!r} object has no attribute {name!r}; write {here}"
        with pytest.raises(AttributeError, match=f"^{re.escape(said)}$"):
            getattr(one, name)
        assert not hasattr(one, name)


def test_an_unknown_attribute_of_a_task_is_named(mill: Tidemill) -> None:
    task: Any = mill.task(send)
    with pytest.raises(AttributeError, match=r"^'Task' object has no attribute 'nonsense'$") as had:
        task.nonsense()
    assert (had.value.name, had.value.obj) == ("nonsense", task)


def test_a_task_is_not_enqueued_by_the_app(mill: Tidemill) -> None:
    task: Any = mill.task(send)
    with pytest.raises(InvalidOption, match=r"write send\.enqueue\("):
        mill.enqueue(task, "a")


def test_no_name_of_ours_counts_as_foreign() -> None:
    assert not _BY_NAME.keys() & {*TASK_OPTIONS, *CALL_OPTIONS, "name"}
    assert not _METHOD_BY_NAME.keys() & {*dir(AsyncTask)}
