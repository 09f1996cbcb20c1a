"""Functions that an app registers with ``atexit`` have the shutdown time."""

from __future__ import annotations

import pytest
from harness import Place

APP = """
import atexit

def at_exit():
    note("exiting")
    time.sleep(SECONDS)
    note("exited")

@mill.task
def registers():
    atexit.register(at_exit)
"""


@pytest.mark.parametrize("slots", [1, 4], ids=["main", "threads"])
def test_atexit_functions_run_to_their_end(place: Place, slots: int) -> None:
    # Given a process whose exit takes longer than a moment.
    place.write(APP.replace("SECONDS", "3"))
    worker = place.worker(slots=slots).wait_ready()
    place.finish([place.enqueue("registers")])
    # When the worker stops; then it waits for that.
    assert worker.stop() == 0
    assert place.notes() == ["exiting", "exited"]
