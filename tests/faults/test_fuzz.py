"""Whatever is sent to the job server, small: the whole of it is ``make fuzz``."""

from __future__ import annotations

from fuzz import fuzz


def test_no_request_is_too_odd() -> None:  # case W2
    options = ("--phases", "fuzzing,stateful", "--max-examples", "3", "--no-shrink")
    seen = fuzz(*options, seed=4)
    assert seen["calls"] > 100
    assert seen["jobs there"] > 0
