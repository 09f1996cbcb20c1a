"""A worker in threads of the test process, on any broker, ``memory://`` included.

    from tidemill.testing import join, run_all, worker

    def test_by_hand():
        with worker(mill):
            assert add.enqueue(1, 2).result(timeout=5) == 3

    def test_until_all_is_done():
        with worker(mill):
            sort_the_post.enqueue()                 # enqueues further jobs
            join(mill, timeout=5)

    def test_all_at_once():
        job = add.enqueue(1, 2)
        run_all(mill)
        assert job.result() == 3

    def test_retries_too():
        job = flaky.enqueue()
        run_all(mill, scheduled=True)               # does not wait for backoff and delays
        assert job.result() == "at last"

    def test_with_the_fixture(tidemill_worker):     # pytest finds it by itself
        tidemill_worker(mill)
        assert add.enqueue(1, 2).result(timeout=5) == 3

Without a worker, ``Tidemill(sync=True)`` runs every call at once, in the caller. To switch an
existing app, use ``monkeypatch.setattr(mill, "sync", True)``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from tidemill.app import Tidemill
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.explain import no_worker
from tidemill.client.job_handle import FOREVER
from tidemill.core.config import Seconds, check_seconds
from tidemill.core.job import FINISHED, Record, State
from tidemill.core.verdicts import waits_for_its_task
from tidemill.errors import ResultTimeout, TidemillError
from tidemill.worker.settings import Settings
from tidemill.worker.supervisor import PATIENCE, Supervisor, judge, running_worker

try:
    import pytest
except ModuleNotFoundError:  # without pytest, as in notebooks, worker() and run_all() still work
    pytest = None  # type: ignore[assignment]

__all__ = ["join", "run_all", "tidemill_worker", "worker"]

MOST_ROUNDS = 200
"""The number of times that ``run_all`` makes scheduled jobs ready before it gives up."""

MOST_NAMED = 5
"""The largest number of jobs that the error of ``join`` names."""

MOST_LOOKS = 10
"""The most searches for unfinished jobs while other programs keep putting messages."""

UNFINISHED = frozenset(State) - FINISHED


def worker(
    mill: Tidemill, concurrency: int = 4, *, queues: Sequence[str] = ()
) -> contextlib.AbstractContextManager[Supervisor]:
    """Run a worker while the block lasts; at its end, running jobs have 30 s to finish.

    Args:
        mill: the app.
        concurrency: the most jobs that run at a time.
        queues: serve only these queues; by default all.

    Raises:
        TidemillError: the worker could not serve, or a job did not end.
    """
    settings = Settings(
        concurrency=concurrency, queues=tuple(queues), shutdown_timeout=PATIENCE, name="testing"
    )
    return running_worker(mill.runtime, settings)


def run_all(
    mill: Tidemill, concurrency: int = 4, *, queues: Sequence[str] = (), scheduled: bool = False
) -> None:
    """Run jobs until no job is ready, including the jobs that these jobs enqueue.

    Jobs that are scheduled for later stay, such as retries with backoff. With ``scheduled`` these
    jobs run, too, before their time, until no job is left.

    Args:
        mill: the app.
        concurrency: the most jobs that run at a time.
        queues: serve only these queues; by default all.
        scheduled: True also runs jobs that are scheduled for later.

    Raises:
        TidemillError: the worker could not serve, a job did not end, or a job was scheduled again
            and again.
    """
    stuck = set[tuple[str, int]]()
    for _ in range(MOST_ROUNDS):
        _run_ready(mill, concurrency, queues)
        if not scheduled:
            return
        retried = _retry_scheduled(mill, queues)
        # Some of these jobs have come due after the round. A job that two rounds leave cannot run.
        ready = {(r.envelope.id, r.current_attempt) for r in _tasks(mill, State.READY, queues)}
        if not retried and ready <= stuck:
            return
        stuck = ready
    raise TidemillError(f"jobs were still put off after {MOST_ROUNDS} rounds; they may never end")


def join(mill: Tidemill, timeout: Seconds | None = None, *, queues: Sequence[str] = ()) -> None:
    """Wait until no unfinished job of a task is left, without polling.

    A worker must run: this function runs no job. It also waits for jobs that these jobs enqueue,
    for delayed jobs and for retries. It does not wait for raw messages.

    Args:
        mill: the app.
        timeout: the most seconds to wait; by default the wait has no end.
        queues: wait for the jobs of these queues only; by default of all queues.

    Raises:
        ResultTimeout: some jobs have not ended after ``timeout`` seconds.
    """
    seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
    until = time.monotonic() + seconds
    while left := _unfinished(mill, queues):
        mill.runtime.job_store.wait_for(
            [r.envelope.id for r in left], max(0.0, until - time.monotonic())
        )
        if time.monotonic() >= until and (left := _unfinished(mill, queues)):
            named = ", ".join(f"{r.envelope.id} ({r.state})" for r in left[:MOST_NAMED])
            why = no_worker(mill.runtime, left[0]) or "tidemill explain ID says why"
            raise ResultTimeout(f"jobs have not ended after {seconds:g} s: {named}; {why}")


def _unfinished(mill: Tidemill, queues: Sequence[str]) -> list[Record]:
    """Some unfinished jobs of tasks; an empty list when there are none.

    While one search reads several pages, a job may enqueue another job and end. The new job belongs
    to the first page, so the search misses it. So an empty result of several pages counts only if
    no job was accepted during the search. The search is repeated at most :data:`MOST_LOOKS` times.
    """
    found, pages = _look(mill, queues)
    for _ in range(MOST_LOOKS if pages > 1 else 0):
        if found:
            break
        accepted = _accepted(mill)
        found, _ = _look(mill, queues)
        if accepted == _accepted(mill):
            break
    return found


def _look(mill: Tidemill, queues: Sequence[str]) -> tuple[list[Record], int]:
    """The first unfinished jobs of tasks, and the number of pages that were read."""
    what, cursor, pages = Filter(states=UNFINISHED), "", 0
    while True:
        page = mill.jobs(what).page(limit=500, cursor=cursor)
        tasks = [r for r in page.records if not r.envelope.is_message]
        found = [r for r in tasks if not queues or r.envelope.queue in queues]
        cursor, pages = page.cursor, pages + 1
        if found or not cursor:
            return found, pages


def _accepted(mill: Tidemill) -> int:
    return sum(row.accepted for row in mill.queues())


def _retry_scheduled(mill: Tidemill, queues: Sequence[str]) -> bool:
    """Make scheduled tasks ready; True if there were any. They keep their number of attempts."""
    found = _tasks(mill, State.SCHEDULED, queues)
    return any(mill.broker.retry([r.envelope.id for r in found if not waits_for_its_task(r)]))


def _tasks(mill: Tidemill, state: State, queues: Sequence[str]) -> Iterator[Record]:
    what, cursor = Filter(states=frozenset({state})), ""
    while True:
        page = mill.jobs(what).page(limit=500, cursor=cursor)
        tasks = (r for r in page.records if not r.envelope.is_message)
        yield from (r for r in tasks if not queues or r.envelope.queue in queues)
        cursor = page.cursor
        if not cursor:
            return


def _run_ready(mill: Tidemill, concurrency: int, queues: Sequence[str]) -> None:
    settings = Settings(
        concurrency=concurrency,
        queues=tuple(queues),
        burst=True,
        shutdown_timeout=PATIENCE,
        name="testing",
    )
    judge([Supervisor(settings, mill.runtime).run()])


def tidemill_worker() -> Iterator[Callable[..., Supervisor]]:
    """A pytest fixture that starts workers for the length of the test.

    The test calls ``tidemill_worker(mill, concurrency=4, queues=())``; see :func:`worker`.
    """
    with contextlib.ExitStack() as stack:

        def start(
            mill: Tidemill, concurrency: int = 4, *, queues: Sequence[str] = ()
        ) -> Supervisor:
            return stack.enter_context(worker(mill, concurrency, queues=queues))

        yield start


if pytest is not None:
    tidemill_worker = pytest.fixture(tidemill_worker)
