"""The hint in an error about a wrong name: the nearest name, or the names that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 20
_LONGEST = 200
"""Characters of a wrong name that are compared."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'queue'?``; empty when no known name is near."""
    near = difflib.get_close_matches(name[:_LONGEST], [str(each) for each in known], 1)
    return f"did you mean {near[0]!r}?" if near else ""


def hint(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or else the first 20 known names."""
    names = sorted(known)
    more = ", …" if len(names) > _LISTED else ""
    return did_you_mean(name, names) or f"known are {', '.join(names[:_LISTED]) or 'none'}{more}"
