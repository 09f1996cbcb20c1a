"""Verdicts on runs: how the result or the exception of a task settles its job; their log lines.

Each run that ended has one line, or one line a second when too many runs end.
"""

from __future__ import annotations

import collections
import logging
from traceback import format_exception
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tidemill.client.context import JobContext, job_name, logged_as
from tidemill.core import retry
from tidemill.core.clock import clock
from tidemill.core.codec import NOT_ENCODED, pack_result
from tidemill.core.config import storable
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease, Note, Outcome, Verdict
from tidemill.errors import JobCancelled
from tidemill.worker.safe_logging import SafeLog

if TYPE_CHECKING:
    from tidemill.worker.execute import Run

log = SafeLog("tidemill.worker")

LINES_MOST = 200  # lines a second that all processes of a worker write together
END = "%s[%s] %s %s %.3f s (queue %s, attempt %d%s)"
"""The end of a run in a line of the log; :func:`end_values` has the values."""

SLOW = "%s[%s] was slow: it ran %.3f s and had waited %.3f s (queue %s, attempt %d, slow from %g s)"
"""The line of a slow run."""

_WORDS = {
    Outcome.SUCCESS: "succeeded",
    Outcome.RETRY: "failed",
    Outcome.FAIL: "failed",
    Outcome.RELEASE: "interrupted",
    Outcome.SNOOZE: "snoozed",
    Outcome.CANCELLED: "cancelled",
}
_LOGGED = (Outcome.RETRY, Outcome.FAIL, Outcome.CANCELLED)

_FAILED, _CANCELLED = END + ": %s; %s", END + ": %s"

_AROUND_THE_TASK = ("tidemill.worker", "tidemill.client.middleware", "tidemill.otel")
"""Modules whose frames lie between the worker and the task."""
_BETWEEN = (*_AROUND_THE_TASK, "tidemill.django.q.calls", "tidemill.django.framework.run")
"""Modules whose frames lie between the user's middleware and the task."""

ERROR_MOST = 2_000  # characters that are kept of an error
TRACEBACK_MOST = 16_000
"""Characters that are kept of a traceback: half of them from its beginning, half from its end."""


def refused(lease: Lease, reason: str) -> Verdict:
    try:
        envelope = lease.open()
    except Exception:  # the envelope cannot be decoded
        log.error("a job was refused: %s", reason)
    else:
        with logged_as(JobContext(envelope, lease.attempt)):
            log.error("%s was refused: %s", job_name(envelope), reason)
    now = clock.wall()
    return Verdict(lease.token, Outcome.FAIL, error=reason, started=now, ended=now)


def success(run: Run, value: Any) -> Verdict:
    now = clock.wall()
    try:
        result = pack_result(value)
    except BaseException as error:  # encoding may run the value's own code
        reason = f"{NOT_ENCODED}: {describe(error)[0]}"
        return _failed(run.lease, run.envelope, Outcome.FAIL, reason, "", run.started)
    return Verdict(run.token, 0, result, 0.0, "", "", run.started, now)


def failure(run: Run, error: BaseException) -> Verdict:
    """The verdict on a job whose task raised an error, even if the error's own code fails."""
    try:
        return _failure(run, error)
    except Exception as inner:
        text = f"{name_of(error)}: its exception cannot be read: {name_of(inner)}"
        return _failed(run.lease, run.envelope, Outcome.RETRY, text, "", run.started)


def _failure(run: Run, error: BaseException) -> Verdict:
    lease, envelope, started = run.lease, run.envelope, run.started
    if isinstance(error, retry.Snooze):
        reason = describe(error)[0]
        return Verdict(
            lease.token, Outcome.SNOOZE, delay=error.delay, error=reason, started=started
        )
    if isinstance(error, retry.Skip):
        run.context.log(f"skipped: {error}" if str(error) else "skipped")
        return success(run, None)
    if isinstance(error, retry.WorkerStopping) and run.context.stopping:
        run.context.log(interrupted_run(lease.token, started, "its worker stops").line)
        return Verdict(lease.token, Outcome.RELEASE, started=started)
    text, trace = describe(error)
    if isinstance(error, retry.JobTerminated):
        return _failed(lease, envelope, Outcome.CANCELLED, "terminated", trace, started)
    if isinstance(error, JobCancelled) and run.context.cancelled:
        reason = storable(str(error)) or "it stopped on request"
        return _failed(lease, envelope, Outcome.CANCELLED, reason, "", started)
    if isinstance(error, retry.JobTimeout):
        return _timed_out(lease, envelope, trace, started, error, caught=run.caught)
    if _does_not_fit(error):
        reason = f"the arguments do not fit the task: {text}"
        return _failed(lease, envelope, Outcome.FAIL, reason, "", started)
    outcome, delay = Outcome.RETRY, None
    if isinstance(error, retry.Fail):
        outcome = Outcome.FAIL
    elif isinstance(error, retry.Retry):
        delay = error.delay
    elif why := _refusal(run, error):
        outcome = Outcome.FAIL
        run.context.log(f"not retried: {why}")
    expected = _is_expected(run, error)
    return _failed(lease, envelope, outcome, text, trace, started, delay, error, expected)


def _refusal(run: Run, error: BaseException) -> str:
    """Why the task's own rule does not retry the error; empty if the rule retries or is broken."""
    rule = run.task.options.retry_rule
    try:
        return rule.refusal(error) if rule is not None else ""
    # The function ``when`` has raised, or a dotted name cannot be imported.
    except BaseException as inner:
        log.error(
            "the retries of task %s cannot be decided, so the job is retried: %s",
            run.envelope.task,
            describe(inner)[0],
        )
        return ""


def _is_expected(run: Run, error: BaseException) -> bool:
    try:
        return retry.is_one_of(error, run.task.options.expects)
    # The import of a dotted name runs the user's code.
    except BaseException as inner:
        task, text = run.envelope.task, describe(inner)[0]
        log.error("expects= of task %s cannot be used: %s", task, text)
        return False


def stuck(
    lease: Lease, envelope: Envelope, trace: str, started: float, terminated: bool
) -> Verdict:
    """The verdict on a job that could not be interrupted, with the stack of its thread."""
    if terminated:
        return _failed(lease, envelope, Outcome.CANCELLED, "terminated", trace, started)
    return _timed_out(lease, envelope, trace, started)


def _timed_out(
    lease: Lease,
    envelope: Envelope,
    trace: str,
    started: float,
    error: BaseException | None = None,
    *,
    caught: bool = False,
) -> Verdict:
    """The verdict on a job that ran past its timeout; the task may have caught the exception."""
    text = f"JobTimeout: not finished after its timeout of {envelope.timeout:g} s"
    if caught:
        text, trace = f"{text}; the task caught the timeout and returned", ""
    return _failed(lease, envelope, Outcome.RETRY, text, trace, started, error=error)


def _failed(
    lease: Lease,
    envelope: Envelope,
    outcome: Outcome,
    text: str,
    trace: str,
    started: float,
    delay: float | None = None,
    error: BaseException | None = None,
    expected: bool = False,
) -> Verdict:
    """Log a run that did not succeed, and return its verdict."""
    # ``trace`` is the traceback of ``error``. Without an error, ``trace`` is the stack of a stuck
    # thread.
    if outcome is Outcome.RETRY and delay is None:
        delay = retry.backoff(envelope.retries, lease.attempt)
    ended = clock.wall()
    verdict = Verdict(lease.token, outcome, b"", delay or 0.0, text, trace, started, ended)
    most = envelope.retries.max_attempts
    again = outcome is Outcome.RETRY and (not most or lease.attempt < most)
    if expected or (again and isinstance(error, retry.Retry)):
        trace = ""  # an expected error needs no traceback in the log, and is one line of INFO
    how = "cancelled" if outcome is Outcome.CANCELLED else "failed"
    with logged_as(JobContext(envelope, lease.attempt)):
        if outcome is Outcome.CANCELLED:
            log.info(_CANCELLED, *end_values(envelope, lease.attempt, how, ended - started), text)
            return verdict
        log.failure(
            logging.INFO if expected else logging.WARNING if again else logging.ERROR,
            _FAILED,
            *end_values(envelope, lease.attempt, how, ended - started, most),
            text,
            f"again in {verdict.delay:.3g} s" if again else "not again",
            exc_info=(type(error), error, _users_part(error)) if error and trace else None,
            exc_text=trace if error else "",
            stack=trace if trace and not error else None,
        )
    return verdict


def describe(error: BaseException) -> tuple[str, str]:
    """The error as one line, and its traceback, even if the error's own code fails."""
    name = name_of(error)
    try:
        message = str(error)[:ERROR_MOST]
    except BaseException as inner:
        message = f"<its message cannot be printed: {name_of(inner)}>"
    try:
        trace = "".join(format_exception(type(error), error, _users_part(error)))
    except BaseException as inner:
        trace = f"<its traceback cannot be printed: {name_of(inner)}>"
    if len(trace) > TRACEBACK_MOST:
        trace = f"{trace[: TRACEBACK_MOST // 2]}\n[…]\n{trace[-TRACEBACK_MOST // 2 :]}"
    text = f"{name}: {message}" if message else name
    return storable(text[:ERROR_MOST])[:ERROR_MOST], storable(trace)


def name_of(error: BaseException) -> str:
    """The qualified name of the exception's type.

    As in Python's tracebacks, types of ``builtins`` and ``__main__`` are named without their
    module. So are tidemill's own types.
    """
    name, module = type(error).__qualname__, type(error).__module__
    own = module in ("builtins", "__main__") or module.partition(".")[0] == "tidemill"
    return name if own else f"{module}.{name}"


def _users_part(error: BaseException) -> Any:
    """The traceback without the frames between the worker, the user's middleware and the task."""
    # A TypeError from ``tidemill.django`` still is an error of the task: Django's own backends
    # treat a call that does not fit the task in the same way.
    trace, kept = error.__traceback__, list[TracebackType]()
    while trace is not None:
        ours = (*_AROUND_THE_TASK, "tidemill.django") if not kept else _BETWEEN
        if not trace.tb_frame.f_globals.get("__name__", "").startswith(ours):
            kept.append(trace)
        trace = trace.tb_next
    for one in reversed(kept):
        line = one.tb_lineno or one.tb_frame.f_code.co_firstlineno  # some code has no line numbers
        trace = TracebackType(trace, one.tb_frame, one.tb_lasti, line)
    return trace or error.__traceback__


def _does_not_fit(error: BaseException) -> bool:
    """True for the TypeError of a call that never reached the task's code."""
    if not isinstance(error, TypeError):
        return False
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if not name.startswith((*_AROUND_THE_TASK, "contextvars")):
            return False
        trace = trace.tb_next
    return True


def end_values(
    envelope: Envelope, attempt: int, how: str, seconds: float, most: int = 0
) -> tuple[object, ...]:
    """The values for :data:`END`; ``most`` is the largest number of attempts."""
    preposition = "in" if how in ("succeeded", "failed") else "after"
    of = f" of {most}" if most else ""
    return envelope.called, envelope.id, how, preposition, seconds, envelope.queue, attempt, of


def _wait_of(run: Run) -> float:
    """Seconds from the due time to the start. For later attempts: seconds from lease to start."""
    envelope = run.envelope
    since = max(envelope.created + envelope.delay, envelope.at)
    return max(0.0, run.started - (since if run.lease.attempt == 1 else run.lease.leased))


def interrupted_run(token: int, started: float, why: str) -> Note:
    """The note of a run that ends now and counts no attempt; ``client.explain`` reads it.

    ``started`` is wall time.
    """
    now = clock.wall()
    return Note(token, line=f"interrupted after {now - started:.3f} s: {why}", time=now)


class RunLog:
    """Logs ended runs at INFO. The threads of jobs call :meth:`ended`, the timekeeper the rest.

    Each process may write an equal part of the ``LINES_MOST`` lines. After these lines, the process
    only counts the runs of the rest of the second. If it counts more runs than it has lines, the
    next second has no lines of single runs. No lock guards the numbers, so a race of threads may
    write a few lines more.
    """

    def __init__(self, processes: int, slow: float = 0.0) -> None:
        self.slow = slow  # a run of at least this many seconds is slow; 0: no run is slow
        self.wanted = log.talks(logging.INFO)  # read once here, since every job asks for it
        self._most = max(1, LINES_MOST // processes)
        self._left = self._most  # the number of lines left for this second
        self._until = 0.0  # machine time at which this second ends
        self._more = "more "  # for the summary: empty when the second has no other lines
        # Outcomes of runs that were only counted.
        self._counted: collections.deque[int] = collections.deque()

    def ended(self, run: Run, verdict: Verdict) -> None:
        if self.slow and (verdict.ended or clock.wall()) - run.started >= self.slow:
            self._write_slow(run, verdict)
        if self._left <= 0:
            self._counted.append(verdict.outcome)
        elif verdict.outcome not in _LOGGED:
            self._write(run, verdict)

    def _write_slow(self, run: Run, verdict: Verdict) -> None:
        envelope = run.envelope
        with logged_as(run.context):
            log.warning(
                SLOW,
                *(envelope.called, envelope.id, (verdict.ended or clock.wall()) - run.started),
                *(_wait_of(run), envelope.queue, run.lease.attempt, self.slow),
            )

    def _write(self, run: Run, verdict: Verdict) -> None:
        now = clock.machine()
        if now >= self._until:
            self._left, self._until = self._most, now + 1.0
        self._left -= 1
        seconds, attempt = (verdict.ended or clock.wall()) - run.started, run.lease.attempt
        how = _WORDS[Outcome(verdict.outcome)]
        with logged_as(run.context):
            log.info(END, *end_values(run.envelope, attempt, how, seconds))

    # -- in the timekeeper ----------------------------------------------------------------------

    def next_look(self, now: float) -> float | None:
        """Seconds until :meth:`look` has to be called; None while each run gets its own line."""
        return None if self._left > 0 else max(0.001, self._until - now)

    def look(self, now: float) -> None:
        if self._left > 0 or now < self._until:
            return
        count = self._summarise()
        self._left, self._more = (0, "") if count > self._most else (self._most, "more ")
        self._until = now + 1.0

    def close(self) -> None:
        self._summarise()

    def _summarise(self) -> int:
        outcomes = [self._counted.popleft() for _ in range(len(self._counted))]
        if outcomes:
            counts = collections.Counter(_WORDS[Outcome(outcome)] for outcome in outcomes)
            log.info(
                "%s %s%s ended in the last second: %s",
                *(f"{len(outcomes):,}", self._more, "jobs" if outcomes[1:] else "job"),
                ", ".join(f"{count:,} {word}" for word, count in counts.most_common()),
            )
        return len(outcomes)
