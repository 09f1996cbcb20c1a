"""A worker whose store is deleted and made anew leaves, and says why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Place, open_place

pytestmark = pytest.mark.everyday

TASK = "@mill.task\ndef double(n):\n    return 2 * n"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with open_place(tmp_path) as place:
        place.write(TASK, load=False)
        yield place


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_worker_whose_store_was_made_anew_leaves_and_the_next_one_serves(
    place: Place, how: str
) -> None:
    # given an idle worker
    worker = place.worker().wait_ready()
    assert place.mill.enqueue(place.task("double"), 1).result(timeout=60) == 2
    place.mill.close()
    # when its store goes, and another one is made in its place
    store = place.path / "store"
    if how == "moved":
        store.rename(place.path / "away")
    else:
        shutil.rmtree(store)
    job = place.mill.enqueue(place.task("double"), 2)
    # then it says so at its next housekeeping, within 30 s, and leaves
    assert worker.wait(limit=60) == 3
    assert worker.output.count("was deleted or replaced while it was open") == 1
    # and the next one serves the new store
    place.worker().wait_ready()
    assert job.result(timeout=60) == 4
