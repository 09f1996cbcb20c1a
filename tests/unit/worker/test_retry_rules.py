"""A task says which exceptions are retried and which are expected. No job stores that."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tidemill import Fail, InvalidOption, Job, Retries, Retry, State, Tidemill
from tidemill.core.envelope import decode_envelope, encode_envelope
from tidemill.core.retry import RetryPolicy
from tidemill.testing import run_all


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill("memory://")


def raising(mill: Tidemill, error: BaseException, **options: Any) -> Any:
    """A task that raises the error."""

    @mill.task(name="raising", **options)
    def raising() -> None:
        raise error

    return raising


def runs(mill: Tidemill, job: Job[Any]) -> int:
    """The number of runs of a job until it has failed."""
    run_all(mill, scheduled=True)
    assert job.state == State.FAILED
    return len(job.attempts)


def http_error(error: BaseException) -> bool:
    return "503" in str(error)


@pytest.mark.parametrize(
    ("rule", "error", "expected_runs"),
    [
        ({"on": TimeoutError}, TimeoutError(), 3),
        ({"on": (OSError, KeyError)}, TimeoutError(), 3),  # a subclass
        ({"on": TimeoutError}, ValueError(), 1),
        ({"never": (ValueError,)}, ValueError(), 1),
        ({"never": ValueError}, UnicodeError(), 1),  # a subclass
        ({"never": ValueError}, KeyError(), 3),
        ({"on": OSError, "never": TimeoutError}, TimeoutError(), 1),
        ({"on": OSError, "never": TimeoutError}, OSError(), 3),
        ({"on": "http.client.HTTPException"}, http.client.BadStatusLine(""), 3),
        ({"never": ["http.client.HTTPException", KeyError]}, http.client.BadStatusLine(""), 1),
        ({"when": http_error}, OSError("503"), 3),
        ({"when": http_error}, OSError("404"), 1),
        ({"on": OSError, "when": http_error}, ValueError("503"), 1),  # when decides last
        ({"never": OSError, "when": http_error}, OSError("503"), 1),
        ({"on": ValueError}, Retry("asked for"), 3),  # the task itself asked for it
        ({"on": Fail}, Fail("no more"), 1),
    ],
)
def test_on_never_and_when_decide_which_errors_are_retried(
    mill: Tidemill, rule: dict[str, Any], error: BaseException, expected_runs: int
) -> None:
    task = raising(mill, error, retries=Retries(2, delay=0, **rule))
    assert runs(mill, task.enqueue()) == expected_runs


def test_the_trail_says_why_an_error_is_not_retried(mill: Tidemill) -> None:
    job = raising(mill, ValueError("bad"), retries=Retries(2, never=ValueError)).enqueue()
    run_all(mill)
    assert (job.state, job.error) == (State.FAILED, "ValueError: bad")
    assert [line for _, line in job.record.log] == [
        "not retried: the task's never= names the error"
    ]


def test_numbers_of_a_call_keep_the_rule_of_the_task(mill: Tidemill) -> None:
    task = raising(mill, KeyError(), retries=Retries(5, delay=0, on=KeyError))
    assert runs(mill, task.using(retries=1).enqueue()) == 2
    never = raising(mill, ValueError(), retries=Retries(5, delay=0, never=ValueError))
    assert runs(mill, never.using(retries=Retries(3, delay=0)).enqueue()) == 1


def test_a_rule_of_the_app_holds_for_tasks_without_a_rule_of_their_own() -> None:
    mill = Tidemill("memory://", retries=Retries(2, delay=0, never=ValueError))
    assert runs(mill, raising(mill, ValueError(), retries=1).enqueue()) == 1
    own = raising(mill, ValueError(), retries=Retries(1, delay=0, on=ValueError))
    assert runs(mill, own.enqueue()) == 2


@pytest.mark.parametrize(
    "rule", [{"when": lambda error: error.missing}, {"never": "http.client.Misspelt"}]
)
def test_a_rule_that_fails_counts_as_retry_and_is_logged(
    mill: Tidemill, caplog: pytest.LogCaptureFixture, rule: dict[str, Any]
) -> None:
    task = raising(mill, ValueError(), retries=Retries(1, delay=0, **rule))
    assert runs(mill, task.enqueue()) == 2
    assert (
        "the retries of task raising cannot be decided, so the job is retried: Attri" in caplog.text
    )


def test_a_job_stores_the_numbers_alone(mill: Tidemill) -> None:
    # law 18
    task = raising(mill, KeyError(), retries=Retries(5, delay=1.0, on=KeyError, when=http_error))
    stored = encode_envelope(mill.runtime.envelope(task.call()))
    assert stored == encode_envelope(decode_envelope(stored))
    assert decode_envelope(stored).retries == RetryPolicy(5, delay=1.0)
    assert b"KeyError" not in stored


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"retries": Retries(on=int)}, "on of retries must be exception classes, or dotted names"),  # type: ignore[arg-type]
        ({"retries": Retries(never="ValueError")}, "never of retries must be .* not 'ValueError'"),
        ({"retries": Retries(on=("a.b", 3))}, "on of retries must be .* not 3"),  # type: ignore[arg-type]
        ({"retries": Retries(when=3)}, "when of retries must be a plain function"),  # type: ignore[arg-type]
        ({"expects": "x y.z"}, "expects must be exception classes"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_at_the_declaration(
    mill: Tidemill, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        raising(mill, ValueError(), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"retries": Retries(on=KeyError)}, "on, never and when of retries cannot be stored"),
        ({"expects": KeyError}, "expects cannot be stored"),
    ],
)
def test_calls_and_messages_refuse_what_only_a_declaration_can_have(
    mill: Tidemill, options: dict[str, Any], sentence: str
) -> None:
    task = raising(mill, ValueError())
    put: list[Callable[..., Any]] = [task.using, task.call().using, mill.queue("q").put]
    for use in put:
        with pytest.raises(InvalidOption, match=sentence):
            use(*(("body",) if use is put[2] else ()), **options)


# -- expected errors -------------------------------------------------------------------------------


def reports(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The log records of the task's failed attempts."""
    return [record for record in caplog.records if "] failed in" in record.getMessage()]


@pytest.mark.parametrize("expects", [OSError, "http.client.socket.timeout", (KeyError, OSError)])
def test_an_expected_error_is_one_line_and_still_a_failure(
    mill: Tidemill, caplog: pytest.LogCaptureFixture, expects: Any
) -> None:
    caplog.set_level(logging.INFO)
    job = raising(
        mill, TimeoutError("busy"), retries=Retries(1, delay=0), expects=expects
    ).enqueue()
    assert runs(mill, job) == 2
    assert mill.queues()[0].failed == 1
    first, last = reports(caplog)
    assert first.levelno == last.levelno == logging.INFO
    assert last.exc_info is None
    assert last.getMessage().endswith("attempt 2 of 2): TimeoutError: busy; not again")
    assert "raise error" in job.attempts[-1].traceback  # the trail has it
