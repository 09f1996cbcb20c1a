"""For users' tests: a worker in threads of this process, on any broker, ``memory://`` included.

    from tidemill.testing import run_all, worker

    def test_by_hand():
        with worker(mill):
            assert add.enqueue(1, 2).result(timeout=5) == 3

    def test_all_at_once():
        job = add.enqueue(1, 2)
        run_all(mill)
        assert job.result() == 3

    def test_retries_too():
        job = flaky.enqueue()
        run_all(mill, scheduled=True)               # backoff and delays are not waited for
        assert job.result() == "at last"

    def test_with_the_fixture(tidemill_worker):     # pytest finds it by itself
        tidemill_worker(mill)
        assert add.enqueue(1, 2).result(timeout=5) == 3

Without any worker, ``Tidemill(sync=True)`` makes every call at once, in the caller; an app that is
made elsewhere does so from ``monkeypatch.setattr(mill, "sync", True)`` on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from tidemill.app import Tidemill
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.errors import TidemillError
from tidemill.core.job import State
from tidemill.worker.supervisor import Settings, Supervisor

try:
    import pytest
except ModuleNotFoundError:  # worker() and run_all() are for any test runner, and for notebooks
    pytest = None  # type: ignore[assignment]

__all__ = ["run_all", "tidemill_worker", "worker"]

MOST_ROUNDS = 200
"""How often ``run_all`` makes scheduled jobs ready before it gives up."""

PATIENCE = 30.0
"""Seconds that jobs which still run have to finish in when the test is over."""


@contextlib.contextmanager
def worker(
    mill: Tidemill, concurrency: int = 4, *, queues: Sequence[str] = ()
) -> Iterator[Supervisor]:
    """Run a worker while the block lasts; at its end the jobs that run may finish.

    Raises:
        TidemillError: the worker could not serve, or a job would not end.
    """
    settings = Settings(
        concurrency=concurrency, queues=tuple(queues), shutdown_timeout=PATIENCE, name="testing"
    )
    supervisor = Supervisor(settings, mill)
    outcome: list[int | BaseException] = []

    def serve() -> None:
        try:
            outcome.append(supervisor.run())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=serve, name="tidemill-worker", daemon=True)
    thread.start()

    def end() -> None:
        supervisor.stop()
        thread.join(2 * PATIENCE)

    mill.before_close.append(end)  # a test may close its app before its fixtures end
    try:
        yield supervisor
    finally:
        mill.before_close.remove(end)
        end()
    _judge(outcome)


def run_all(
    mill: Tidemill, concurrency: int = 4, *, queues: Sequence[str] = (), scheduled: bool = False
) -> None:
    """Run jobs until none is ready, those included that the jobs enqueue; then return.

    Jobs that are scheduled for later stay where they are, a retry with backoff among them. With
    ``scheduled`` they are run as well, without waiting for their time, until nothing is left.

    Raises:
        TidemillError: the worker could not serve, a job would not end, or one puts itself off
            again and again.
    """
    for _ in range(MOST_ROUNDS):
        _run_ready(mill, concurrency, queues)
        if not scheduled or not _kick_scheduled(mill, queues):
            return
    raise TidemillError(f"jobs were still put off after {MOST_ROUNDS} rounds: do they ever end?")


def _kick_scheduled(mill: Tidemill, queues: Sequence[str]) -> bool:
    """Make scheduled tasks ready; True if there were any. Attempts go on being counted."""
    what = Filter(states=frozenset({State.SCHEDULED}))
    ids, cursor = [], ""
    while True:
        page = mill.find(what, limit=500, cursor=cursor)
        known = [r for r in page.records if not r.unknown]
        tasks = [r.envelope for r in known if not r.envelope.is_message]
        ids += [task.id for task in tasks if not queues or task.queue in queues]
        cursor = page.cursor
        if not cursor:
            return any(mill.broker.kick(ids))


def _run_ready(mill: Tidemill, concurrency: int, queues: Sequence[str]) -> None:
    settings = Settings(
        concurrency=concurrency,
        queues=tuple(queues),
        burst=True,
        shutdown_timeout=PATIENCE,
        name="testing",
    )
    _judge([Supervisor(settings, mill).run()])


def _judge(outcome: Sequence[int | BaseException]) -> None:
    if not outcome:
        raise TidemillError("the worker did not end: a job of it still runs")
    (how,) = outcome
    if isinstance(how, BaseException):
        raise how
    if how == 1:
        raise TidemillError(f"jobs still ran {PATIENCE:g} s after the end, and were given up")
    if how:
        raise TidemillError("the worker could not serve; the log says why")


def tidemill_worker() -> Iterator[Callable[..., Supervisor]]:
    """Start workers for the length of the test: ``tidemill_worker(mill, concurrency=4)``."""
    with contextlib.ExitStack() as stack:

        def start(mill: Tidemill, concurrency: int = 4, **options: Sequence[str]) -> Supervisor:
            return stack.enter_context(worker(mill, concurrency, **options))

        yield start


if pytest is not None:
    tidemill_worker = pytest.fixture(tidemill_worker)
