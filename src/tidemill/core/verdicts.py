"""The rules of a verdict: whether it counts an attempt, and the state that it gives a job.

The rules are the same on every broker.
"""

from __future__ import annotations

from tidemill.core.job import NOT_STARTED, WHILE_RUNNING, Outcome, State, Verdict

TOO_LATE = "not started before it expired"

COUNTED = frozenset(Outcome) - {Outcome.RELEASE, Outcome.SNOOZE, Outcome.UNKNOWN}
"""The outcomes that count an attempt."""

MAY_NOT_HAVE_RUN = frozenset({Outcome.RELEASE, Outcome.UNKNOWN})
"""The outcomes that refund the tokens of limits, if the job has not run under its lease."""

_ENDS = {
    Outcome.SUCCESS: State.SUCCEEDED,
    Outcome.FAIL: State.FAILED,
    Outcome.CANCELLED: State.CANCELLED,
    Outcome.EXPIRED: State.EXPIRED,
}


def outcome_of(verdict: Verdict, attempt: int, max_attempts: int) -> Outcome:
    """The outcome of a verdict on an attempt: a retry of the last attempt is a failure.

    ``max_attempts`` is 0 for no limit.
    """
    is_last = bool(max_attempts) and attempt >= max_attempts
    is_failure = verdict.outcome == Outcome.RETRY and is_last
    return Outcome.FAIL if is_failure else Outcome(verdict.outcome)


def end_of(
    verdict: Verdict, outcome: Outcome, *, cancelling: bool, expired: bool
) -> tuple[State, str] | None:
    """The final state of a job and its error; None when the job goes on.

    ``cancelling`` or ``expired`` ends a job that would go on; ``cancelling`` takes precedence.
    """
    if outcome in _ENDS:
        return _ENDS[outcome], "" if outcome is Outcome.SUCCESS else verdict.error
    if cancelling:
        told = {Outcome.RELEASE: verdict.error, Outcome.UNKNOWN: NOT_STARTED}.get(outcome, "")
        return State.CANCELLED, told or WHILE_RUNNING
    return (State.EXPIRED, TOO_LATE) if expired else None
