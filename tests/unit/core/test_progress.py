"""Progress is shown in whole numbers, whatever a task reports."""

from __future__ import annotations

import math

from tidemill.core.job import whole_progress


def test_fractions_are_cut_off_and_no_number_counts_as_none() -> None:
    assert whole_progress(33.9, 100.0) == (33, 100)
    assert whole_progress(math.inf, math.nan) == (0, 0)
