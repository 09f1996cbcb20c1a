"""A sample of the misdeeds, each in one pool of a real worker; ``make abuse`` tries all."""

from __future__ import annotations

from pathlib import Path

import pytest

from abuse.catalogue import catalogue
from abuse.rig import one_cell, try_misdeed
from abuse.table import PAGE, titles

WITHIN = 40.0
"""Seconds for the next job: other tests run meanwhile, more than there are cores."""

SAMPLE = (
    *("fork_child_returns", "pool_by_fork", "exec_long", "exits", "exits_at_once_with_code"),
    *("exits_in_thread", "alarm_raises", "timer_raises_later", "subtask_exits", "loop_stopped"),
    *("closes_all", "closes_standard", "uses_up_descriptors", "reaches_memory_limit"),
    *("threads_cannot_start", "huge_message", "recursion_limit_lowered", "backtracks"),
    *("unprintable", "handler_raises", "joins_group_and_blocks", "breaks_pipe"),
)
EVERYDAY = (
    *("fork_child_returns", "exits", "exits_in_thread", "subtask_exits", "alarm_raises"),
    *("breaks_pipe", "uses_up_descriptors", "reaches_memory_limit", "backtracks"),
    *("unprintable", "handler_raises"),
)


@pytest.mark.everyday(*EVERYDAY)
@pytest.mark.parametrize("name", SAMPLE)
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
