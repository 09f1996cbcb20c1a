"""To ask a busy process for its stacks does not harm the process."""

from __future__ import annotations

import signal

import pytest
from harness import Place, eventually

from tidemill.core.job import State

APP = """
import json

def deep(n, value):
    if n:
        return deep(n - 1, [value])
    return json.loads(json.dumps({"a": [str(i) for i in range(50)]}))

@mill.task
def busy():
    begin()
    made = []
    while not os.path.exists(HERE + "/go"):
        made = [(lambda x: (yield x))(i) for i in range(20)]
        [list(g) for g in made]
        deep(20, None)
        exec("def f(): return 1\\nf()", {})
    end()

@mill.task(timeout=1.0, retries=0)
def holds():
    begin()
    hold_gil(60)
"""


def test_three_hundred_dumps_of_a_busy_process(place: Place) -> None:
    # given: threads that run Python all the time
    place.write(APP)
    worker = place.worker(slots=4).wait_ready()
    jobs = [place.enqueue("busy") for _ in range(4)]
    place.wait_notes("begin", 4)
    (process,) = eventually(worker.children, "the process")
    # when: half of the signals go to the worker, half to the process itself
    for count in range(1, 151):
        worker.send(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR1)
        worker.wait_line("--- stacks of worker process", count)
    # then
    assert [child.pid for child in worker.children()] == [process.pid]
    assert "in busy" in worker.output
    (place.path / "go").touch()
    assert [(r.state, r.attempt) for r in place.finish(jobs)] == [(State.SUCCEEDED, 1)] * 4
    assert len(place.ledger()) == 8
    assert worker.stop() == 0


@pytest.mark.parametrize("rounds", [3])
def test_the_stack_of_a_held_lock_is_the_stack_of_its_thread(place: Place, rounds: int) -> None:
    # law 8
    place.write(APP)
    worker = place.worker(slots=2).wait_ready()
    for _ in range(rounds):
        (record,) = place.finish([place.enqueue("holds")])
        (attempt,) = record.attempts
        assert "in hold_gil" in attempt.traceback
    assert "SIGSEGV" not in worker.output
    assert worker.stop() == 0
