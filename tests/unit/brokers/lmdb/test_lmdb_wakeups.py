"""The places to sleep of a store: which sleepers a hint reaches, whatever slots are in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.brokers.lmdb.engine.wakeup import ALL, RESULT, TASKS, Sleeper, WakeUps
from tidemill.core.files import Folder

ENDS = st.sampled_from([10, 20, 30, ALL])
MARKS = st.lists(st.tuples(st.integers(0, 19), st.sampled_from([0, TASKS, RESULT]), ENDS))


def hinted(sleeper: Sleeper) -> bool:
    try:
        return bool(os.read(sleeper.fd, 4096))
    except BlockingIOError:
        return False


@settings(max_examples=60, deadline=None)
@given(marks=MARKS, most=st.integers(1, 3), due=st.sampled_from([5, 15, 25, 35]))
def test_marks_decide_who_is_hinted(
    tmp_path_factory: pytest.TempPathFactory, marks: list[tuple[int, int, int]], most: int, due: int
) -> None:
    # given 20 places to sleep, which were marked and cleared in any order
    folder = tmp_path_factory.mktemp("wake")
    wakeups = WakeUps(Folder(str(folder)))
    sleepers = [wakeups.take(number + 1) for number in range(20)]
    expected: dict[int, tuple[int, int]] = {}
    for which, mask, until in marks:
        wakeups.mark(sleepers[which], mask, ALL, until)
        expected.pop(which, None)
        if mask:
            expected[which] = mask, until
    for_jobs = {which: until for which, (mask, until) in expected.items() if mask == TASKS}
    assert wakeups.anyone() == bool(expected)

    # when the store needs somebody who wakes at a due time
    wakeups.keep_time(due)

    # then a sleeper that takes jobs wakes by then, or one such sleeper is hinted
    woken = {which for which in range(20) if hinted(sleepers[which])}
    assert woken <= set(for_jobs)
    assert len(woken) <= 1
    assert woken or not for_jobs or min(for_jobs.values()) <= due

    # when there are jobs
    rung = wakeups.ring(TASKS, most=most)

    # then the first of the sleepers that are left are hinted, and no others
    left = sorted(set(for_jobs) - woken)[:most]
    assert [which for which in range(20) if hinted(sleepers[which])] == left
    assert rung == len(left)
    for sleeper in sleepers:
        wakeups.give_up(sleeper)
    assert not wakeups.anyone()
    wakeups.close()


def test_a_hint_after_the_commit_changes_no_slot(tmp_path: Path) -> None:
    # given a sleeper that was hinted, and whose process dies
    ours, theirs = WakeUps(Folder(str(tmp_path))), WakeUps(Folder(str(tmp_path)))
    sleeper = theirs.take(1)
    theirs.mark(sleeper, TASKS, ALL)
    assert ours.wake(sleeper.slot)
    theirs.close_sleeper(sleeper)
    slots = ours._map[:]
    # when the writer tells it of the commit, without the lock
    ours.confirm(sleeper.slot)
    # then the place is as it was: another process may take it just now
    assert ours._map[:] == slots
    for each in (ours, theirs):
        each.close()


def test_a_writer_that_dies_before_its_hint_leaves_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 9
    wakeups = WakeUps(Folder(str(tmp_path)))
    sleeper = wakeups.take(1)
    wakeups.mark(sleeper, TASKS, ALL)

    def die(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wakeups, "_hint", die)
        with pytest.raises(KeyboardInterrupt):
            wakeups.ring(TASKS)
    assert wakeups.ring(TASKS) == 1
    assert hinted(sleeper)
    wakeups.close()
