"""Backoff grows, is jittered, never exceeds its cap; exceptions check what they are given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.retry import (
    ENDLESS,
    JobTerminated,
    JobTimeout,
    Retry,
    RetryPolicy,
    Snooze,
    backoff,
)
from tidemill.errors import InvalidOption


def test_without_jitter_the_bound_doubles_up_to_the_cap() -> None:
    # case T5
    policy = RetryPolicy(delay=5, cap=60, jitter=False)
    assert [backoff(policy, attempt) for attempt in range(1, 7)] == [5, 10, 20, 40, 60, 60]


def test_with_jitter_delays_fill_the_range_below_the_bound() -> None:
    # case T5
    policy = RetryPolicy(delay=4)
    for attempt, bound in ((1, 4.0), (2, 8.0), (5, 64.0)):
        drawn = [backoff(policy, attempt) for _ in range(400)]
        assert all(0 <= delay <= bound for delay in drawn)
        assert min(drawn) < bound / 4
        assert max(drawn) > bound * 3 / 4
        assert len(set(drawn)) > 300


@given(
    st.floats(0, 1e9), st.floats(1, 1000), st.floats(0, 1e9), st.booleans(), st.integers(1, 10**9)
)
def test_never_beyond_the_cap_however_late(
    delay: float, factor: float, cap: float, jitter: bool, attempt: int
) -> None:
    # case T5
    policy = RetryPolicy(delay=delay, factor=factor, cap=cap, jitter=jitter)
    assert 0 <= backoff(policy, attempt) <= cap


def test_no_delay_is_no_delay() -> None:
    assert backoff(RetryPolicy(delay=0), 5) == 0


def test_defaults_and_limits() -> None:
    # law 7
    assert RetryPolicy() == RetryPolicy(limit=3, delay=5.0, factor=2.0, cap=3600.0, jitter=True)
    policies = RetryPolicy(), RetryPolicy(0), ENDLESS
    assert [policy.max_attempts for policy in policies] == [4, 1, 0]


def test_exceptions_of_a_task_steer_its_job() -> None:
    # case T4
    assert (Retry().delay, Retry(delay=0).delay, str(Retry("why"))) == (None, 0, "why")
    assert (Snooze(5).delay, str(Snooze(5))) == (5, "snoozed for 5 s")
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(InvalidOption, match="delay of Retry"):
            Retry(delay=wrong)
        with pytest.raises(InvalidOption, match="delay of Snooze"):
            Snooze(wrong)


def test_being_stopped_is_no_ordinary_exception() -> None:
    # law 8: ``except Exception`` in a task does not swallow it
    assert not issubclass(JobTimeout, Exception)
    assert not issubclass(JobTerminated, Exception)
