"""People who come from other queues are told what a thing is called here; nothing is aliased."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tidemill import InvalidOption, Tidemill, chain, map_many


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill("memory://")


def send(to: str, *, subject: str = "") -> str:
    return to


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("delay", r"task\.enqueue\("),
        ("send", r"task\.enqueue\("),
        ("apply_async", r"task\.using\("),
        ("s", r"task\.call\("),
        ("retry", "raise Retry"),
    ],
)
def test_a_foreign_verb_names_ours(mill: Tidemill, name: str, here: str) -> None:
    task: Any = mill.task(send)
    for target in (task, task.using(priority=1)):
        with pytest.raises(AttributeError, match=rf"no \.{name}; write .*{here}"):
            getattr(target, name)
        assert not hasattr(target, name)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("get", r"job\.result\(timeout=5\), or await job"),
        ("ready", r"job\.state"),
        ("revoke", r"job\.cancel\(\)"),
        ("forget", r"job\.delete\(\)"),
        ("then", r"chain\("),
    ],
)
def test_a_foreign_verb_of_a_result_names_ours(mill: Tidemill, name: str, here: str) -> None:
    task = mill.task(send)
    handles: list[Any] = [
        task.enqueue("a"),
        mill.enqueue(chain(task.call("a"), task)),
        mill.enqueue(map_many(task, "ab")),
    ]
    for handle in handles:
        with pytest.raises(AttributeError, match=rf"no \.{name}; write {here}"):
            getattr(handle, name)
        assert not hasattr(handle, name)
        with pytest.raises(AttributeError, match="object has no attribute 'resutl'"):
            handle.resutl  # noqa: B018
        assert copy.copy(handle) == handle


def test_any_other_name_is_an_ordinary_attribute_error(mill: Tidemill) -> None:
    task: Any = mill.task(send)
    with pytest.raises(AttributeError, match="'Task' object has no attribute 'enqeue'") as caught:
        task.enqeue("a")
    assert (caught.value.name, caught.value.obj) == ("enqeue", task)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("countdown", "delay="),
        ("eta", "at="),
        ("max_retries", "retries="),
        ("time_limit", "timeout="),
        ("task_id", "id="),
        ("bind", r"current_job\(\)"),
    ],
)
def test_a_foreign_option_names_ours(mill: Tidemill, name: str, here: str) -> None:
    with pytest.raises(InvalidOption, match=rf"unknown option '{name}' .*here it is {here}"):
        mill.task(send).using(**{name: 5})


def test_an_option_among_the_arguments_is_shown_its_place(mill: Tidemill) -> None:
    task: Any = mill.task(send)
    for name, here in (("delay", "delay"), ("countdown", "delay"), ("eta", "at")):
        with pytest.raises(TypeError, match=rf"'{name}'; .*send\.using\({here}=…\)\.enqueue"):
            task.enqueue("a", **{name: 5})
    with pytest.raises(TypeError, match=r"'nonsense'$"):
        task.enqueue("a", nonsense=5)


def test_a_task_is_not_enqueued_by_the_app(mill: Tidemill) -> None:
    task: Any = mill.task(send)
    with pytest.raises(InvalidOption, match=r"write send\.enqueue\("):
        mill.enqueue(task, "a")
