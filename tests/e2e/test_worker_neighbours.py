"""A stuck job costs its neighbours no result and no time.

A process with a stuck job takes nothing new, a replacement starts at once, and the neighbours
finish, bounded by ``--stuck-grace`` (law 8).
"""

from __future__ import annotations

from harness import ON_SERVERS, Place, runs_of

APP = """
@mill.task(timeout=0.4, retries=0)
def sleeps():
    begin()
    time.sleep(30)

@mill.task
def brief(seconds):
    begin()
    time.sleep(seconds)
    end()
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
