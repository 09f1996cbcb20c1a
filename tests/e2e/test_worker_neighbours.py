"""A stuck job costs its neighbours no result and no time.

A process with a stuck job takes nothing new, a replacement starts at once, and the neighbours
finish, bounded by ``--stuck-grace`` (law 8).
"""

from __future__ import annotations

from harness import ON_SERVERS, Place, alive, check_no_overlap, eventually, runs_of

from tidemill.core.job import State

APP = """
@mill.task(timeout=0.4, retries=0)
def sleeps():
    begin()
    time.sleep(30)

@mill.task(timeout=0.4, retries=0)
def holds():
    begin()
    hold_gil(60)

@mill.task
def brief(seconds):
    begin()
    time.sleep(seconds)
    end()

def until_told(name="go"):
    begin()
    until = time.time() + 60
    while time.time() < until and not os.path.exists(f"{HERE}/{name}"):
        time.sleep(0.01)
    end()

@mill.task(retries=0)
def last_attempt(): until_told()

@mill.task
def with_retries(): until_told()

@mill.task
def with_retries_first(): until_told("first")

@mill.task
def short(): begin(); end()
"""


@ON_SERVERS
def test_a_neighbour_that_ended_with_the_last_one_does_not_run_again(place: Place) -> None:
    # case T6: its verdict is read before the process is killed
    place.write(APP)
    place.worker(slots=4).wait_ready()
    for _ in range(8):
        # when: three neighbours end at one instant, after the fourth job is stuck
        jobs = [place.enqueue("brief", 1.2) for _ in range(3)]
        place.finish([place.enqueue("sleeps"), *jobs])
    # then
    for job_id, runs in runs_of(place.ledger()).items():
        assert len(runs) == 1, (job_id, runs)


@ON_SERVERS
def test_a_neighbour_without_another_attempt_outlives_the_grace(place: Place) -> None:
    # given: a stuck job, and beside it one job with attempts left and one without
    place.write(APP)
    worker = place.worker("--stuck-grace", "0.5", slots=3).wait_ready()
    last, other = place.enqueue("last_attempt"), place.enqueue("with_retries_first")
    place.wait_notes("begin", 2)
    (old,) = [child.pid for child in worker.children()]
    stuck = place.enqueue("sleeps", timeout=1)
    place.finish([stuck])
    # when: the replacement has done much, and the grace is over
    for _ in range(3):
        place.finish([place.enqueue("brief", 0.4)])
    # then: the old process lives until the neighbour without attempts ends, and the other may end
    assert alive(old)
    for name, neighbour in (("first", other), ("go", last)):
        (place.path / name).touch()
        (record,) = place.finish([neighbour])
        assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
    again = [job_id for job_id, runs in runs_of(place.ledger()).items() if len(runs) > 1]
    assert not again, (again, place.notes(), place.outputs())
    eventually(lambda: not alive(old), "the stuck process is killed")
    assert worker.stop() == 0


def test_the_log_and_the_trail_say_for_whom_a_neighbour_was_interrupted(place: Place) -> None:
    place.write(APP)
    worker = place.worker("--stuck-grace", "0.3", slots=3).wait_ready()
    neighbour = place.enqueue("with_retries")
    place.wait_notes("begin")
    stuck = place.enqueue("sleeps", timeout=1)
    place.finish([stuck])
    place.wait_notes(f"begin {neighbour.id}", 2)
    (place.path / "go").touch()
    (record,) = place.finish([neighbour])
    assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
    reason = f"{place.task('sleeps')}[{stuck.id}] ran past its timeout"
    (said,) = [event.detail for event in neighbour.trail if event.what == "log"]
    assert said.startswith("interrupted after ")
    assert reason in said
    assert f"{place.task('with_retries')}[{neighbour.id}] was interrupted" in worker.output
    assert reason in worker.output
    check_no_overlap(place.ledger())


def test_a_held_interpreter_lock_ends_the_grace(place: Place) -> None:
    # given: a neighbour that could run on for an hour, were anybody able to run
    place.write(APP)
    worker = place.worker(slots=2).wait_ready()
    neighbour = place.enqueue("last_attempt")
    place.wait_notes("begin")
    (old,) = [child.pid for child in worker.children()]
    # when
    (record,) = place.finish([place.enqueue("holds", timeout=1)])
    # then
    assert "hold_gil" in record.attempts[0].traceback
    eventually(lambda: not alive(old), "the process is killed")
    (place.path / "go").touch()
    (record,) = place.finish([neighbour])
    assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
    assert worker.stop() == 0


def test_the_end_of_the_worker_overrides_the_grace(place: Place) -> None:  # case T11
    place.write(APP)
    worker = place.worker("--shutdown-timeout", "0.5", slots=2).wait_ready()
    neighbour = place.enqueue("last_attempt")
    place.wait_notes("begin")
    place.finish([place.enqueue("sleeps", timeout=1)])
    assert worker.stop() == 1
    record = neighbour.refresh()
    assert (record.state, record.attempt) == (State.READY, 0)
