"""The error of a purged job, which names the purge.

A purge that keeps its jobs cancels them with this error. A restore brings back the jobs whose error
names the purge. Lua and SQL files contain the text, too, so change it in all places.
"""

from __future__ import annotations

_BEGIN = "purged, in purge "


def purged(purge_id: str) -> str:
    """The error of a purged job."""
    return f"{_BEGIN}{purge_id}"


def is_purged(error: str) -> bool:
    """True for the error of a job of any purge."""
    return error.startswith(_BEGIN)


def is_of_purge(error: str, purge_id: str) -> bool:
    """True for the error of a job of this purge."""
    return error == purged(purge_id)
