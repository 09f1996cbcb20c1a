"""The progress of a job: the done part and the total, as whole numbers."""

from __future__ import annotations

from math import isfinite


def whole_progress(done: float, total: float) -> tuple[int, int]:
    """(done, total) of a report. Fractions are cut off; NaN and infinity become 0."""
    return (int(done) if isfinite(done) else 0, int(total) if isfinite(total) else 0)
