"""Numbers of things as text."""

from __future__ import annotations

from tidemill.core.words import counted


def test_one_thing_is_singular() -> None:
    assert [counted(n, "ready job") for n in (0, 1, 2_000)] == [
        *("0 ready jobs", "1 ready job", "2,000 ready jobs")
    ]
