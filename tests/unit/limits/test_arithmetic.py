"""The arithmetic of limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.envelope import LimitSettings
from tidemill.limits.arithmetic import (
    NEVER,
    Limiter,
    change,
    clear_at,
    ended,
    give_back,
    opens,
    room,
    take,
    tokens,
)

S = 1_000_000
T0 = 5_000 * S

rates = st.one_of(
    st.none(), st.tuples(st.sampled_from([0.0, 0.3, 1.0, 7.0, 1e6]), st.floats(0.1, 1000))
)
windows = st.one_of(st.none(), st.tuples(st.integers(0, 9), st.floats(0.1, 100)))
terms_of_any_kind = st.builds(
    LimitSettings,
    rate=rates,
    burst=st.one_of(st.integers(1, 30), st.floats(1, 30)),
    window=windows,
    concurrency=st.one_of(st.none(), st.integers(0, 5)),
    breaker=st.one_of(st.none(), st.tuples(st.integers(1, 3), st.floats(0.1, 50))),
)


def starts(
    terms: LimitSettings, seconds: float, gate: Limiter | None = None, cost: float = 1.0
) -> list[int]:
    """When jobs start that are always there and take no time, from T0 on."""
    gate, now, times = gate or Limiter(), T0, []
    while now <= T0 + seconds * S:
        when = opens(terms, gate, 0, now, cost)
        if when == NEVER:
            break
        if when:
            now = when
            continue
        take(terms, gate, now, cost)
        times.append(now - T0)
    return times


def test_a_bucket_gives_its_burst_at_once_and_then_the_rate() -> None:
    # case S5
    times = starts(LimitSettings(rate=(10, 1), burst=20), 10)
    assert times[:20] == [0] * 20
    assert times[20:23] == pytest.approx([100_000, 200_000, 300_000], abs=2)
    assert len(times) == 20 + 100


def test_unused_tokens_do_not_exceed_the_burst() -> None:
    # case S5
    terms, gate = LimitSettings(rate=(10, 1), burst=3), Limiter()
    take(terms, gate, T0)
    assert room(terms, gate, 0, T0 + 3600 * S, 99) == 3


def test_a_rate_of_nothing_lets_nothing_start() -> None:
    # case S5
    assert starts(LimitSettings(rate=(0, 1), burst=20), 10) == []


def test_a_costly_job_takes_more_tokens_but_never_waits_for_more_than_there_can_be() -> None:
    times = starts(LimitSettings(rate=(10, 1), burst=10), 2, cost=5)
    assert times[:4] == pytest.approx([0, 0, 500_000, 1_000_000], abs=2)
    times = starts(LimitSettings(rate=(10, 1), burst=2), 9, cost=40)
    assert times[:3] == pytest.approx([0, 4_000_000, 8_000_000], abs=2)


def test_a_window_never_holds_more_wherever_it_begins() -> None:
    times = starts(LimitSettings(window=(5, 10), rate=(2, 1), burst=3), 100)
    for first in times:
        assert sum(first <= time < first + 10 * S for time in times) <= 5
    assert len(times) >= 5 * (100 / 10.5 - 1)


def test_concurrency_counts_running_jobs() -> None:
    terms = LimitSettings(concurrency=3)
    assert room(terms, Limiter(), 1, T0, 99) == 2
    assert opens(terms, Limiter(), 3, T0) == NEVER


def test_a_breaker_opens_for_one_try_at_a_time() -> None:
    # case S6
    terms, gate = LimitSettings(breaker=(3, 10)), Limiter()
    for _ in range(2):
        ended(terms, gate, T0, well=False)
    assert room(terms, gate, 0, T0, 99) == 1  # no more at a time than may fail yet
    assert opens(terms, gate, 5, T0) == NEVER
    ended(terms, gate, T0, well=False)
    assert opens(terms, gate, 2, T0) == T0 + 10 * S
    assert room(terms, gate, 0, T0 + 10 * S, 99) == 1
    assert opens(terms, gate, 1, T0 + 10 * S) == NEVER
    ended(terms, gate, T0 + 11 * S, well=False)
    assert opens(terms, gate, 0, T0 + 12 * S) == T0 + 21 * S
    ended(terms, gate, T0 + 22 * S, well=True)
    assert room(terms, gate, 0, T0 + 22 * S, 99) == 99


@given(terms=terms_of_any_kind, more=terms_of_any_kind, data=st.data())
def test_any_limiter_opens_at_the_predicted_time(
    terms: LimitSettings, more: LimitSettings, data: st.DataObject
) -> None:
    gate, now = Limiter(), T0
    for _ in range(data.draw(st.integers(0, 12))):
        act = data.draw(st.sampled_from(["wait", "take", "take", "back", "fail", "change"]))
        if act == "wait":
            now += data.draw(st.integers(0, 30 * S))
        elif act == "take":
            take(terms, gate, now, data.draw(st.sampled_from([1, 1, 2.5])))
        elif act == "back":
            give_back(terms, gate, now)
        elif act == "fail":
            ended(terms, gate, now, well=False)
        else:
            change(terms, more, gate, now)
            terms, more = more, terms
    running = data.draw(st.integers(0, 3))
    when = opens(terms, gate, running, now)
    assert (when == 0) == (room(terms, gate, running, now, 99) > 0)
    assert when == 0 or when > now
    if 0 < when < NEVER and running == 0:
        assert opens(terms, gate, running, when) == 0
        assert opens(terms, gate, running, when - 1) != 0 or when - 1 <= now
    free = room(terms, gate, running, now, 99)
    for started in range(free):  # as many may start one by one
        assert opens(terms, gate, running + started, now) == 0
        take(terms, gate, now)
    cleared = clear_at(terms, gate)
    if gate.failures == 0 and terms.concurrency is None:
        assert opens(terms, gate, 0, max(now, cleared)) == opens(terms, Limiter(), 0, now)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_change_of_rate_keeps_the_tokens_that_are_there(factor: float) -> None:
    # case S5
    old, new, gate = (
        LimitSettings(rate=(10, 1), burst=20),
        LimitSettings(rate=(10 * factor, 1), burst=20),
        Limiter(),
    )
    for _ in range(15):
        take(old, gate, T0)
    change(old, new, gate, T0)
    assert tokens(new, gate, T0) == pytest.approx(5)
    assert tokens(new, gate, T0 + S // 2) == pytest.approx(5 + 5 * factor)


def test_a_refund_is_taken_from_its_own_slot() -> None:
    terms, gate = LimitSettings(window=(2, 64.0)), Limiter()
    take(terms, gate, T0)
    take(terms, gate, T0 + 30 * S)
    give_back(terms, gate, T0)
    take(terms, gate, T0 + 31 * S)
    assert opens(terms, gate, 0, T0 + 66 * S) > T0 + 94 * S
    give_back(terms, gate, T0 - 90 * S)  # long gone: it counts no more
    give_back(terms, gate, T0 + 10 * S)
    assert sum(count for _, count in gate.slots) == 2
