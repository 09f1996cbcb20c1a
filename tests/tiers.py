"""Which tests run in ``make quick``, in ``make test`` and in ``make full``.

A mark decides, the nearest one. Without a mark the brokers of a test of the contract decide
(``conformance/kinds.py``), and else the folder: ``FOLDERS`` below.
"""

from __future__ import annotations

import pytest

QUICK, TEST, FULL = TIERS = ("quick", "test", "full")
"""Each tier runs what the tiers before it run, and more."""

MARKS = {
    "everyday": (TEST, "(*ids): runs in make test; with ids only the parameters with them do"),
    "full": (FULL, "(*ids): runs in make full only; with ids only the parameters with them do"),
}
SIZES = {"TIDEMILL_ROUNDS": "1", "TIDEMILL_EXAMPLES": "5"}
"""How much the tests do at random in the tiers before the last."""

FOLDERS = {
    "unit": QUICK,
    "unit/brokers/redis": TEST,
    "unit/brokers/postgres": TEST,
    "unit/brokers/rabbitmq": FULL,
    "simulation": QUICK,
    "conformance": QUICK,
    "typing": FULL,
    "django": FULL,
    "e2e": FULL,
    "faults": FULL,
    "abuse": FULL,
}


def latest(*tiers: str) -> str:
    """The tier that runs most."""
    return max(tiers, key=TIERS.index)


def tier_of(item: pytest.Item) -> str:
    """The first tier that runs a test."""
    for mark in item.iter_markers():  # the nearest first
        if mark.name in MARKS and _concerns(mark, item):
            return MARKS[mark.name][0]
    folder = item.path.relative_to(item.config.rootpath / "tests").parent
    return next(FOLDERS[str(above)] for above in (folder, *folder.parents) if str(above) in FOLDERS)


def _concerns(mark: pytest.Mark, item: pytest.Item) -> bool:
    """Whether a mark is for a test with these parameters."""
    parameters = f"-{item.callspec.id}-" if hasattr(item, "callspec") else ""
    return not mark.args or any(f"-{name}-" in parameters for name in mark.args)
