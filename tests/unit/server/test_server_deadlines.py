"""Ends of waits: never early, and at most a little late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.server.shared_owner import MOST, SHARE, SHORTEST, round_moment


@given(st.floats(0, 1e9), st.floats(0, 1e5))
def test_a_wait_never_ends_early_or_much_later(now: float, seconds: float) -> None:
    late = round_moment(now, seconds) - (now + seconds)
    assert 0 <= late <= min(MOST, max(seconds, SHORTEST) / SHARE)
