"""Small charts without axes, as paths of SVG."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 100, 24


def spark(values: Sequence[float]) -> str:
    """The path of a line through values. The bottom is 0, the top is the largest value."""
    if len(values) < 2:
        return ""
    most = max(values) or 1
    step = WIDTH / (len(values) - 1)
    points = [
        f"{place * step:.1f},{HEIGHT - value / most * (HEIGHT - 2):.1f}"
        for place, value in enumerate(values)
    ]
    return "M" + "L".join(points)
