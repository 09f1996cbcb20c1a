"""What RabbitMQ cannot do is refused by name: where it is declared, and before anything is opened.

No server is there: whatever connected would end as ``BrokerUnavailable``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from tidemill import Tidemill, chain, group
from tidemill.cli import main
from tidemill.errors import FeatureMissing

NOWHERE = "amqp://127.0.0.1:1/?patience=0.2"


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill(NOWHERE)


def work(size: int = 1) -> int:
    return size


DECLARED = {"key=": {"key": "k"}, "limit=": {"limit": "1/s"}, "result_ttl=": {"result_ttl": 60}}


@pytest.mark.parametrize("option", [*DECLARED, "a schedule"])
def test_an_option_is_refused_where_it_is_declared(mill: Tidemill, option: str) -> None:
    given = DECLARED.get(option, {"schedule": 5})
    with pytest.raises(FeatureMissing, match=rf"^{option} needs the feature \w+, which amqp://"):
        mill.task(**given)(work)
    if option != "a schedule":
        with pytest.raises(FeatureMissing, match=f"^{option}"):
            Tidemill(NOWHERE, **given)


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("key=", {"key": "k"}),
        ("limit=", {"limit": "1/s"}),
        ("result_ttl=", {"result_ttl": 60}),
        ("id=", {"id": "mine"}),
        ("txn=", {"txn": object()}),
    ],
)
def test_an_option_is_refused_where_it_is_used(
    mill: Tidemill, option: str, given: dict[str, Any]
) -> None:
    task = mill.task(work)
    for use in (
        lambda: task.using(**given).enqueue(1),
        lambda: mill.enqueue_many([task.using(**given).call(1)]),
        lambda: mill.enqueue(task.call(1).using(**given)),
    ):
        with pytest.raises(FeatureMissing, match=rf"^{option} needs the feature .* amqp://"):
            use()
    if option != "result_ttl=":
        with pytest.raises(FeatureMissing, match=f"^{option}"):
            mill.queue("q").put(1, **given)


@pytest.mark.parametrize(
    ("what", "use"),
    [
        ("max_size=", lambda mill: mill.queue("q", max_size=5)),
        ("rate=", lambda mill: mill.queue("q", rate="1/s")),
        ("concurrency=", lambda mill: mill.queue("q", concurrency=2)),
        ("breaker=", lambda mill: mill.queue("q", breaker=2)),
        ("pause", lambda mill: mill.queue("q").pause()),
        ("resume", lambda mill: mill.queue("q").resume()),
        ("looking at a job", lambda mill: mill.job("j").refresh()),
        ("looking at a job", lambda mill: mill.job("j").state),
        ("waiting for a job", lambda mill: mill.job("j").wait(1)),
        ("waiting for a job", lambda mill: mill.job("j").result(timeout=1)),
        ("waiting for a job", lambda mill: mill.job("j").result(timeout=0)),
        ("cancel", lambda mill: mill.job("j").cancel()),
        ("a schedule", lambda mill: mill.schedule("s", mill.task(work).call(), 5)),
        ("a schedule", lambda mill: [*mill.schedules]),
        ("a chain", lambda mill: mill.enqueue(chain(mill.task(work).call(1)))),
        ("a chain", lambda mill: mill.enqueue(group([mill.task(work).call(1)]))),
        ("a chain", lambda mill: _hooked(mill)),
        ("a hook", lambda mill: mill.enqueue_many([_call_with_hook(mill)])),
    ],
)  # fmt: skip
def test_missing_features_are_refused_by_name(
    mill: Tidemill, what: str, use: Callable[[Tidemill], Any]
) -> None:
    with pytest.raises(FeatureMissing, match=rf"^{what}.* needs the feature \w+, which amqp://"):
        use(mill)


def _call_with_hook(mill: Tidemill) -> Any:
    task = mill.task(work)
    return task.call(1).on_failure(task.call(2))


def _hooked(mill: Tidemill) -> Any:
    return mill.enqueue(_call_with_hook(mill))


@pytest.mark.parametrize(
    "line",
    [
        *("cancel j", "pause q", "resume q"),
        *("limit", "schedule list", "schedule pause s", "backup there"),
    ],
)
def test_a_verb_says_what_it_lacks(line: str) -> None:
    verb = line.split()[0]
    done = CliRunner().invoke(main, [*line.split(), "--url", NOWHERE])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"tidemill: tidemill {verb} needs the feature ")
    assert done.stderr.count("\n") == 1


def test_a_call_from_the_shell_is_refused_before_anything_is_put() -> None:
    for option in ("--wait 3", "--key k", "--id mine"):
        given = ["enqueue", "math.sqrt", "2", *option.split(), "--url", NOWHERE]
        done = CliRunner().invoke(main, given)
        assert done.exit_code == 1
        assert f"{option.split()[0].removeprefix('--')}" in done.stderr
        assert "needs the feature" in done.stderr


def test_present_features_are_not_refused(mill: Tidemill) -> None:
    task = mill.task(queue="a", priority=5, retries=2, timeout=3, expires=60, tags=["x"])(work)
    mill.runtime.envelope(task.using(delay=3, headers={"a": "b"}).call(1))
    assert Tidemill(NOWHERE, sync=True).task(work).enqueue(4).result() == 4
