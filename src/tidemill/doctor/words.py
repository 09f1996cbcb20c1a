"""Numbers, times and sizes as people read them."""

from __future__ import annotations

_UNITS = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"))


def running_in_words(leased: int, fetched: int | None) -> str:
    """The numbers of running and fetched jobs: ``22 running, 356 fetched``.

    ``fetched`` is None if the store's number of leased jobs is all that is known.
    """
    if fetched is None:
        return f"{leased:,} running or fetched"
    text = f"{max(0, leased - fetched):,} running"
    return f"{text}, {fetched:,} fetched" if fetched else text


def duration(seconds: float) -> str:
    """A time span in two units at most: ``340 ms``, ``2.4 s``, ``3 min 20 s``, ``2 d 4 h``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    left = round(seconds)
    for place, (unit, name) in enumerate(_UNITS):
        if left >= unit:
            whole, rest = divmod(left, unit)
            below, lower = _UNITS[place + 1] if place + 1 < len(_UNITS) else (1, "s")
            part = rest // below
            return f"{whole} {name} {part} {lower}" if part else f"{whole} {name}"
    return f"{left} s"


def size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
