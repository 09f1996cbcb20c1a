"""The error of a purged job, which names the purge.

A purge that keeps its jobs cancels them with this error. A restore brings back the jobs whose error
names the purge. Lua and SQL files contain the text, too, so change it in all places.
"""

from __future__ import annotations

from tidemill.core.errors import InvalidOption

_BEGIN, _WAITED = "purged, in purge ", "; it waited for jobs"
_ID_MOST = 64


def check_purge_id(purge_id: str) -> str:
    """Refuse an id that cannot be the id of a purge.

    Raises:
        InvalidOption: the id is not made of at most 64 letters and digits.
    """
    if not (purge_id.isascii() and purge_id.isalnum() and len(purge_id) <= _ID_MOST):
        text = f"at most {_ID_MOST} letters and digits, not {purge_id[:80]!r}"
        raise InvalidOption(f"the id of a purge must be {text}; queue.purges() lists the ids")
    return purge_id


def purged(purge_id: str, *, waited: bool) -> str:
    """The error of a purged job; ``waited`` says whether the job waited for other jobs."""
    return f"{_BEGIN}{purge_id}{_WAITED if waited else ''}"


def is_purged(error: str) -> bool:
    """True for the error of a job of any purge."""
    return error.startswith(_BEGIN)


def is_of_purge(error: str, purge_id: str) -> bool:
    """True for the error of a job of this purge."""
    return error.removesuffix(_WAITED) == f"{_BEGIN}{purge_id}"


def had_waited(error: str) -> bool:
    """True for the error of a purged job that waited for other jobs."""
    return error.endswith(_WAITED)
