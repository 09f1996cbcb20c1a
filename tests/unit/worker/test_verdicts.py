"""Ends of runs: their lines in the log, and the texts of their errors."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from moved_clock import MovedClock

from tidemill.client.context import JobContext, mark_records, running_job
from tidemill.client.options import Options
from tidemill.core.envelope import Envelope, encode_envelope
from tidemill.core.job import Lease, Outcome, Verdict
from tidemill.core.retry import Retries, Retry
from tidemill.worker import verdicts
from tidemill.worker.execute import Run
from tidemill.worker.verdicts import LINES_MOST, TRACEBACK_MOST, RunLog, describe


@pytest.fixture(autouse=True)
def _factory_put_back(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "tidemill.worker")
    before = logging.getLogRecordFactory()
    mark_records()
    yield
    logging.setLogRecordFactory(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    return MovedClock(monkeypatch, speed=0.0, machine=100.0)


def run(attempt: int = 1, **options: Any) -> Run:
    """A run of a job that has begun at wall time 10."""
    envelope = Envelope(id="j1", task="shop.send", queue="mail", **options)
    lease = Lease(7, attempt, envelope.rank, 0, 0, 0.0, 0.0, 0.0, b"")
    task: Any = SimpleNamespace(options=Options())
    return Run(7, lease, envelope, task, JobContext(envelope, attempt), 0, 10.0)


def verdict(outcome: Outcome = Outcome.SUCCESS) -> Verdict:
    return Verdict(7, outcome, started=10.0, ended=10.25)


def test_a_run_has_a_line_that_names_the_job(
    caplog: pytest.LogCaptureFixture, clock: MovedClock
) -> None:
    RunLog(1).ended(run(attempt=2), verdict())
    (record,) = caplog.records
    line = "shop.send[j1] succeeded in 0.250 s (queue mail, attempt 2)"
    assert (record.levelname, record.getMessage()) == ("INFO", line)
    given = vars(record)
    assert [given[f"tidemill_{name}"] for name in ("job_id", "task", "queue", "attempt")] == [
        *("j1", "shop.send", "mail", 2)
    ]
    assert running_job.get() is None


def test_lines_beyond_the_bound_become_one_a_second(
    caplog: pytest.LogCaptureFixture, clock: MovedClock
) -> None:
    # given two processes, that share the bound
    log, most = RunLog(2), LINES_MOST // 2
    # when more runs end within a second
    for _ in range(most + 1500):
        log.ended(run(), verdict())
    log.ended(run(), verdict(Outcome.FAIL))
    log.look(clock.machine() + 0.9)
    assert len(caplog.records) == most
    # then the second ends with a summary of the others
    assert log.next_look(clock.machine() + 0.9) == pytest.approx(0.1)
    clock.advance(1.0)
    log.look(clock.machine())
    line = "1,501 more jobs ended in the last second: 1,500 succeeded, 1 failed"
    assert caplog.messages[most:] == [line]
    # and in the next second only a summary stands for the runs
    log.ended(run(), verdict())
    assert len(caplog.records) == most + 1
    clock.advance(1.0)
    log.look(clock.machine())
    assert caplog.messages[-1] == "1 job ended in the last second: 1 succeeded"
    # and after a second with few runs each has its line again
    assert log.next_look(clock.machine()) is None
    log.ended(run(), verdict())
    assert caplog.messages[-1].startswith("shop.send[j1] succeeded")


def test_the_end_of_the_process_loses_no_summary(
    caplog: pytest.LogCaptureFixture, clock: MovedClock
) -> None:
    log = RunLog(1)
    for _ in range(LINES_MOST + 2):
        log.ended(run(), verdict())
    log.close()
    assert caplog.messages[-1] == "2 more jobs ended in the last second: 2 succeeded"


# -- failures -------------------------------------------------------------------------------------


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("attempt", "level", "next_"), [(1, "WARNING", "again in 5 s"), (2, "ERROR", "not again")]
)
def test_a_failure_is_logged_with_its_exception(
    caplog: pytest.LogCaptureFixture, attempt: int, level: str, next_: str
) -> None:
    error = raised(ValueError("no such thing"))
    job = run(attempt, retries=Retries(1, delay=5, jitter=False))
    found = verdicts.failure(job, error)
    (record,) = caplog.records
    assert record.levelname == level
    assert record.getMessage().endswith(
        f"attempt {attempt} of 2): ValueError: no such thing; {next_}"
    )
    assert record.exc_info[:2] == (ValueError, error)
    assert record.exc_text == found.traceback.rstrip()
    assert vars(record)["tidemill_job_id"] == "j1"


def test_a_retry_that_a_task_asks_for_has_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    verdicts.failure(run(), raised(Retry("later", delay=3)))
    (record,) = caplog.records
    assert (record.levelname, record.exc_info, record.stack_info) == ("WARNING", None, None)
    assert record.getMessage().endswith("Retry: later; again in 3 s")


def test_a_stuck_job_is_logged_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    job = run(timeout=2.0)
    verdicts.stuck(job.lease, job.envelope, "File somewhere", 10.0, terminated=False)
    (record,) = caplog.records
    assert (record.exc_info, record.stack_info) == (None, "File somewhere")
    assert "JobTimeout: not finished after its timeout of 2 s; again in " in record.getMessage()
    assert vars(record)["tidemill_job_id"] == "j1"


def test_a_refused_job_is_named(caplog: pytest.LogCaptureFixture) -> None:
    lease = Lease(7, 2, 0, 0, 0, 0.0, 0.0, 0.0, encode_envelope(run().envelope))
    verdicts.refused(lease, "bad signature: it has none")
    (record,) = caplog.records
    assert record.message == "shop.send[j1] was refused: bad signature: it has none"
    assert (record.levelname, *attributes(record)) == ("ERROR", "j1", "shop.send", "mail", 2)


def attributes(record: Any) -> tuple[Any, ...]:
    """The job that a record names."""
    return (
        *(record.tidemill_job_id, record.tidemill_task),
        *(record.tidemill_queue, record.tidemill_attempt),
    )


# -- errors as text: bounded, whatever the exception holds ----------------------------------------


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


def test_an_error_in_code_without_line_numbers_is_named() -> None:
    def fails() -> None:
        raise ValueError("no lines")

    fails.__code__ = fails.__code__.replace(co_linetable=b"")
    try:
        fails()
    except ValueError as error:
        text, trace = describe(error)
    assert text == "ValueError: no lines"
    assert trace


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
