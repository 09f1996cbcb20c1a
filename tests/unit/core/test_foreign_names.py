"""Errors tell users of other queues the name of an option here; no option has an alias."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from tidemill import InvalidOption, Job, JobGroup, Tidemill, chain, map_many
from tidemill.core import foreign_names
from tidemill.core.foreign_names import Kind, our_result_attribute
from tidemill.workflows.chain_handle import JobChain


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
    ]
    for handle in handles:
        with pytest.raises(AttributeError, match=rf"no \.{name}; write {here}"):
            getattr(handle, name)
        assert not hasattr(handle, name)
    whole: Any = mill.enqueue(map_many(task, "ab"))
    there = {"get": r"group\.results\(timeout=5\)"}.get(name, here.replace("job", "group"))
    with pytest.raises(AttributeError, match=rf"no \.{name}; write {there}"):
        getattr(whole, name)
    for handle in (*handles, whole):
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
        ("autoretry_for", r"retries=Retries\(3, on="),
        ("throws", "expects="),
        ("time_limit", "timeout="),
        ("task_id", "id="),
        ("bind", r"this_job\(\)"),
    ],
)
def test_a_foreign_option_names_ours(mill: Tidemill, name: str, here: str) -> None:
    with pytest.raises(InvalidOption, match=rf"unknown option '{name}' .*; write {here}"):
        mill.task(send).using(**{name: 5})


def test_an_option_among_the_arguments_is_shown_its_place(mill: Tidemill) -> None:
    task: Any = mill.task(send)
    for name, here in (("delay", "delay"), ("countdown", "delay"), ("eta", "at")):
        with pytest.raises(TypeError, match=rf"'{name}'; .*send\.using\({here}=…\)\.enqueue"):
            task.enqueue("a", **{name: 5})
    with pytest.raises(TypeError, match=r"'nonsense'; task .*send takes \(to, \*, subject=''\)$"):
        task.enqueue("a", nonsense=5)


def test_a_task_is_not_enqueued_by_the_app(mill: Tidemill) -> None:
    task: Any = mill.task(send)
    with pytest.raises(InvalidOption, match=r"write send\.enqueue\("):
        mill.enqueue(task, "a")


# -- every name of the migration pages -------------------------------------------------------------

NAMES = {
    "app": """send_task conf add_periodic_task autodiscover_tasks periodic_task lock_task rate_limit
        signal actor add_job scheduled_job AsyncResult control""",
    "option": """acks_late acks_on_failure reject_on_worker_lost ignore_result track_started
        store_results serializer compression base shadow exchange link link_error retry_jitter
        retry_backoff_max retry_kwargs notify_shutdown pipe_ignore on_retry_exhausted on_failure
        on_success on_stopped depends_on at_front failure_ttl default_timeout description meta
        repeat webhooks broker broker_url backend result_backend hook group cluster save cached
        ack_failure sync schedule_type next_run intended_date_kwarg trigger misfire_grace_time
        max_instances coalesce replace_existing run_date next_run_time start_date end_date seconds
        minutes hours""",
    "task": """apply delay_on_commit enqueue_call revoke restore is_revoked then error AsyncResult
        update_state replace logger retries retry_delay actor_name copy""",
    "handle": """failed success stopped get_results latest_result get_meta save_meta is_queued
        is_started is_scheduled is_canceled is_revoked is_successful reschedule reset collect
        children parent completed kill get_position func_name args kwargs""",
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_of_another_queue_gets_advice(mill: Tidemill, kind: str) -> None:
    task: Any = mill.task(send)
    target = {"app": mill, "task": task, "option": task, "handle": task.enqueue("a")}[kind]
    for name in NAMES[kind].split():
        advice = rf"{name}\b.*; (write|give|leave it out:) .+"
        if kind == "option":
            with pytest.raises(InvalidOption, match=advice):
                task.using(**{name: 5})
            continue
        with pytest.raises(AttributeError, match=rf"has no \.{advice}"):
            getattr(target, name)
        assert not hasattr(target, name)


@pytest.mark.parametrize("option", ["broker", "result_backend", "backend", "broker_url"])
def test_the_url_stands_for_broker_and_backend(option: str) -> None:
    given: Any = {option: "redis://localhost"}
    with pytest.raises(InvalidOption, match=r"of Tidemill; give the URL: Tidemill\('redis://…'\)"):
        Tidemill(**given)


def test_an_error_inside_a_property_of_the_app_is_not_hidden(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Tidemill) -> None:
        raise AttributeError("the driver has no .connect")

    monkeypatch.setattr(Tidemill, "broker", property(broken))
    with pytest.raises(AttributeError, match=r"^the driver has no .connect$"):
        mill.broker  # noqa: B018
    monkeypatch.undo()
    with pytest.raises(AttributeError, match=r"^'Tidemill' object has no attribute 'enqeue'$"):
        mill.enqeue  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "handle"), [("job", Job), ("chain", JobChain), ("group", JobGroup)]
)
def test_advice_names_only_attributes_that_the_handle_has(kind: Kind, handle: type) -> None:
    for name in {*foreign_names._HANDLES, *foreign_names._CHAINS, *foreign_names._GROUPS}:
        advice = our_result_attribute(name, kind)
        own = "group" if kind == "group" else "job"
        for attribute in re.findall(rf"(?<![.\w]){own}\.(\w+)", advice):
            assert hasattr(handle, attribute), f"{name}: {advice}"
        assert kind != "group" or not re.search(r"(?<![.\w])job\.", advice), f"{name}: {advice}"
