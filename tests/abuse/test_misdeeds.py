"""Each misdeed in one pool of a real worker; ``make abuse`` tries all pools."""

from __future__ import annotations

from pathlib import Path

import pytest

from abuse.catalogue import catalogue
from abuse.rig import one_cell, try_misdeed
from abuse.table import PAGE, titles

WITHIN = 40.0
"""Seconds for the next job: other tests run meanwhile, more than there are cores."""

EVERYDAY = (
    *("fork_child_returns", "exits", "subtask_exits", "alarm_raises", "uses_up_descriptors"),
    *("reaches_memory_limit", "backtracks", "unprintable", "handler_raises", "closes_all"),
)


@pytest.mark.everyday(*EVERYDAY)
@pytest.mark.parametrize("name", catalogue())
def test_a_worker_serves_on_after_a_misdeed(tmp_path: Path, name: str) -> None:
    # given a worker with one pool, a different pool for each misdeed in turn
    entry = catalogue()[name]
    pool, slots = one_cell(entry)
    # when a task does the misdeed
    outcome = try_misdeed(entry, pool, slots, tmp_path / "cell", WITHIN)
    # then its job ends as the catalogue says, and all other jobs run
    assert not outcome.problems, f"{pool} x {slots}: {outcome.problems}\n{outcome.output}"


@pytest.mark.everyday
def test_the_page_shows_each_misdeed_of_the_catalogue() -> None:
    assert titles(PAGE.read_text()) == [entry.title for entry in catalogue().values()]
