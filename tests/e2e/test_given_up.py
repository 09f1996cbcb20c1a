"""A worker that the broker gave up while it lives: it begins anew, and its late verdicts fall."""

from __future__ import annotations

import pytest
from harness import Place, eventually

from tidemill.core.job import State


@pytest.mark.everyday
def test_a_worker_that_was_given_up_comes_back_and_its_late_verdicts_are_refused(
    place: Place,
) -> None:
    # laws 4, 5
    place.write(
        """
        @mill.task(retries=3)
        def held(name):
            begin()
            while not os.path.exists(os.path.join(HERE, f"go-{this_job().attempt}-{name}")):
                time.sleep(0.01)
            note("cancelled", this_job().cancelled)
            return os.getpid()
        """
    )
    job = place.enqueue("held", "x")
    worker = place.worker(slots=2).wait_ready()
    place.wait_notes("begin", 1)
    [owner] = place.mill.broker.owners()
    # when: without a witness, as if its machine had vanished
    assert place.mill.broker.release(owner.id, None) == 1
    # then: the job runs again, here since there is nobody else, beside the run that nobody wants
    place.wait_notes("begin", 2)
    worker.wait_line("begins anew")
    assert [o.id for o in place.mill.broker.owners()] == [owner.id]
    (place.path / "go-1-x").touch()
    place.wait_notes("cancelled True")
    record = place.wait_state(job, State.SUCCEEDED)
    assert (record.attempt, record.losses, len(record.attempts)) == (1, 1, 1)
    eventually(lambda: len([n for n in place.notes() if n.startswith("cancelled")]) == 2)
    assert place.enqueue("held", "x").wait(60) is State.SUCCEEDED
    assert worker.stop() == 0
