"""A store that refuses steps: the numbers of a worker are those of its jobs all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import eventually
from servers import postgres_store, redis_url
from test_worker_history import in_store

from tidemill import State, Tidemill
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.history_rows import ALWAYS, HOUR, MINUTE
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.clock import new_id
from tidemill.core.job import Outcome, Verdict
from tidemill.core.rollup import FAILED, SUCCEEDED
from tidemill.errors import StoreFull
from tidemill.testing import worker

pytestmark = pytest.mark.everyday("redis", "postgresql")

URLS: dict[str, Callable[[Path], str]] = {
    "lmdb": lambda folder: f"lmdb://{folder}/store",
    "redis": lambda folder: f"{redis_url()}?prefix=t{new_id()}",
    "postgresql": lambda folder: postgres_store(f"t{new_id()}"),
}
JOBS = 6


@pytest.fixture(params=URLS)
def mill(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tidemill]:
    monkeypatch.setenv("TIDEMILL_WAITS", '{"retry": 0.01, "refused": 0}')
    with Tidemill(URLS[request.param](tmp_path)) as mill:
        yield mill


class Held:
    """Jobs that run until the test opens the gate."""

    def __init__(self, mill: Tidemill) -> None:
        self.gate = threading.Event()
        self.mill = mill

        @mill.task(name="held")
        def held() -> None:
            self.gate.wait(60)

        mill.enqueue_many([held.call() for _ in range(JOBS)])

    def running(self) -> list[int]:
        """The tokens of the jobs, once all run."""
        what = Filter(states=frozenset({State.RUNNING}))

        def tokens() -> list[int]:
            records = self.mill.broker.find(what).records
            return [one.token for one in records if len(records) == JOBS]

        return eventually(tokens, "all jobs run")

    def lose(self, token: int) -> None:
        """Give a job back behind the back of its worker: its verdict will be refused."""
        (owner,) = self.mill.broker.owners()
        back = Verdict(token, Outcome.RELEASE)
        assert self.mill.broker.exchange(Step(owner.id, [back])).settled == [True]

    def wait(self) -> None:
        """Wait until all jobs have ended."""
        eventually(lambda: sum(q.size for q in self.mill.queues()) == 0, "all jobs have ended")


def refuse(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, refuses: Callable[[Step], Exception | None]
) -> list[Step]:
    """Let the store refuse steps; returns the list of refused steps."""
    exchange, refused = mill.broker.exchange, list[Step]()

    def answers(step: Step) -> Reply:
        error = refuses(step)
        if error is not None:
            refused.append(step)
            raise error
        return exchange(step)

    monkeypatch.setattr(mill.broker, "exchange", answers)
    return refused


def check(mill: Tidemill, succeeded: int, failed: int = 0) -> None:
    (queue,) = mill.queues()
    assert (queue.succeeded, queue.failed) == (succeeded, failed)
    for span in (MINUTE, HOUR, ALWAYS):
        assert in_store(mill, "task", SUCCEEDED, span) == succeeded
        assert in_store(mill, "task", FAILED, span) == failed
    assert in_store(mill, "failure", FAILED) == failed


def test_verdicts_of_a_full_store_whose_leases_were_lost_do_not_count(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given jobs that run, of which two were given to others
    held = Held(mill)
    with worker(mill, JOBS):
        for token in held.running()[1:4:2]:
            held.lose(token)
        # when the store has no room for more than two verdicts, nor for the first rows
        full = [1, 2, 3]

        def refuses(step: Step) -> Exception | None:
            if len(step.verdicts) > 2 or (step.history and full):
                if step.history:
                    full.pop()
                return StoreFull("no room")
            return None

        refused = refuse(mill, monkeypatch, refuses)
        held.gate.set()
        held.wait()
    # then each job counts once
    assert refused
    check(mill, JOBS)


def test_a_verdict_that_cannot_be_stored_counts_as_the_failure_in_its_place(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given jobs that run, of which one was given to others
    held = Held(mill)
    with worker(mill, JOBS):
        one, other, *_ = held.running()
        held.lose(one)

        # when the store refuses the verdicts of this job and another, and of no other kind
        def refuses(step: Step) -> Exception | None:
            tokens = {v.token for v in step.verdicts if v.outcome == Outcome.SUCCESS}
            return ValueError("bad") if tokens & {one, other} else None

        refused = refuse(mill, monkeypatch, refuses)
        held.gate.set()
        held.wait()
    # then the failure of the other counts, and the failure of the lost one does not
    assert refused
    check(mill, JOBS - 1, failed=1)
