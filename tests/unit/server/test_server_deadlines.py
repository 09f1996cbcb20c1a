"""Ends of waits: never early, a little late, and many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidemill.server.deadlines import MOST, SHARE, SHORTEST, Deadlines, round_moment


@given(st.floats(0, 1e9), st.floats(0, 1e5))
def test_a_wait_never_ends_early_or_much_later(now: float, seconds: float) -> None:
    late = round_moment(now, seconds) - (now + seconds)
    assert 0 <= late <= min(MOST, max(seconds, SHORTEST) / SHARE)


def test_waits_with_one_deadline_share_a_timer() -> None:
    class Loop:
        """Its clock stands until it is set; what it is to call is in ``calls``."""

        def __init__(self) -> None:
            self.now = 1000.0
            self.calls: list[tuple[float, Callable[..., None], float]] = []

        def time(self) -> float:
            return self.now

        def call_at(self, when: float, call: Callable[..., None], moment: float) -> None:
            self.calls.append((when, call, moment))

    loop: Any = Loop()
    told: list[str] = []
    deadlines = Deadlines(loop, told.append)
    moments = {who: deadlines.begin(who, 60) for who in "abc"}
    loop.now += 0.1
    moments["d"] = deadlines.begin("d", 60)
    loop.now += 0.5
    moments["e"] = deadlines.begin("e", 60)
    assert [when for when, _, _ in loop.calls] == sorted(set(moments.values()))
    deadlines.end("b", moments["b"])
    deadlines.end("b", moments["b"])
    for _, call, moment in loop.calls:
        call(moment)
    assert told == ["a", "c", "d", "e"]
    deadlines.end("a", moments["a"])  # it has been told: nothing happens
    assert deadlines._ends == {}
    assert len(loop.calls) == 3
    # and what must not be late is not
    assert deadlines.begin("f", 60, 60) == loop.now + 60
    assert deadlines.begin("g", 60, 60.01) == loop.now + 60.01
    assert deadlines.begin("h", 60, 70) == round_moment(loop.now, 60)
