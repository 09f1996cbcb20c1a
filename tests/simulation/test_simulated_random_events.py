"""Random events in a random order: each job ends once, and none is lost, doubled or starved."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from simulator import FOREVER, Simulation, Worker, simulation

from tidemill import Retries, State

MANY = Retries(50, delay=0)
ONCE_MORE = Retries(1, delay=0)
INNOCENT: dict[str, dict[str, Any]] = {
    "quick": {"seconds": 0.05, "retries": MANY},
    "brief": {"seconds": 1.5, "timeout": 60.0, "retries": MANY},
    "long": {"seconds": 20.0, "retries": MANY},
    "blocked for a while": {"seconds": 8.0, "ignores": True, "retries": MANY},
    "cleans up": {"seconds": 15.0, "cleans_up": 2.0, "retries": MANY},
    "stops on request": {"seconds": 30.0, "heeds_cancel": True, "retries": MANY},
}
"""Tasks that do no harm: their jobs must not fail."""
GUILTY: dict[str, dict[str, Any]] = {
    "raises": {"seconds": 0.2, "raises": ValueError("no"), "retries": ONCE_MORE},
    "loops": {"seconds": FOREVER, "timeout": 2.0, "retries": ONCE_MORE},
    "stuck": {"seconds": FOREVER, "ignores": True, "timeout": 2.0, "retries": ONCE_MORE},
    "stuck once": {
        "seconds": FOREVER,
        "ignores": True,
        "timeout": 2.0,
        "retries": ONCE_MORE,
        "again": {"seconds": 0.1},
    },
    "holds the lock": {
        "seconds": FOREVER,
        "holds_lock": True,
        "timeout": 2.0,
        "retries": ONCE_MORE,
    },
    "holds the lock for a while": {"seconds": 6.0, "holds_lock": True, "retries": MANY},
    "ends late": {"seconds": 2.2, "ignores": True, "timeout": 2.0, "retries": ONCE_MORE},
    "kills its process": {"seconds": 1.0, "kills": 9, "retries": ONCE_MORE},
    "breaks its process": {"seconds": 1.0, "breaks": True, "retries": ONCE_MORE},
    "last attempt": {"seconds": 10.0, "retries": 0},
}

pauses = st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0, 3.0, 10.0])
names = st.sampled_from([*INNOCENT, *GUILTY])
enqueues = st.tuples(st.just("enqueue"), names, st.integers(1, 6))
troubles = st.tuples(
    st.sampled_from(["stall", "be_away", "be_full"]), st.sampled_from([0.5, 3.0, 15.0])
)
others = st.tuples(
    st.sampled_from(
        [
            *("kill process", "kill process", "cancel", "terminate", "no start", "broken code"),
            *("reload", "quiet", "TERM", "QUIT", "kill worker", "lose worker", "give up", "go"),
        ]
    ),
    st.integers(0, 5),
)
events = st.lists(
    st.tuples(pauses, enqueues | enqueues | troubles | others), min_size=1, max_size=12
)
shapes = st.fixed_dictionaries(
    {
        "processes": st.integers(1, 2),
        "concurrency": st.sampled_from([1, 2, 4]),
        "max_jobs": st.sampled_from([0, 0, 3]),
        "stuck_grace": st.sampled_from([0.0, 5.0, 60.0]),
        "shutdown_timeout": st.sampled_from([0.0, 5.0, 30.0]),
    }
)


class Story:
    """One run of a simulation through random events."""

    def __init__(self, sim: Simulation, shape: dict[str, Any]) -> None:
        self.sim, self.shape = sim, shape
        self.tasks = {name: sim.task(name, **how) for name, how in {**INNOCENT, **GUILTY}.items()}
        self.jobs: list[Any] = []
        self.worker = sim.worker(**shape)
        # A run that has ended may run again after these: nobody heard of its end.
        self.may_repeat = False
        self.given_up = False
        self.asked: set[str] = set()  # jobs that somebody wanted cancelled

    def go_on(self) -> Worker:
        """The worker that serves; a fresh one if the last one has ended or is about to."""
        if self.worker.ended:
            self.worker = self.sim.cold_worker(**self.shape)
        return self.worker

    def act(self, what: str, *args: Any) -> None:
        """Have one event happen."""
        sim, worker = self.sim, self.go_on()
        if what == "enqueue":
            name, count = args
            self.jobs += [self.tasks[name].enqueue() for _ in range(count)]
        elif what in ("stall", "be_away", "be_full"):
            getattr(sim.store, what)(*args)
        elif what in ("cancel", "terminate") and self.jobs:
            job = self.jobs[args[0] % len(self.jobs)]
            self.asked.add(job.id)
            job.cancel(terminate=what == "terminate")
        elif what in ("kill process", "go") and worker.processes:
            process = worker.processes[args[0] % len(worker.processes)]
            process.die(9) if what == "kill process" else process.told_to_go()
        elif what == "no start":
            worker.cannot_start_processes(args[0])
        elif what == "broken code":
            sim.app.error = "" if sim.app.error else "SyntaxError: invalid syntax"
        elif what in ("kill worker", "lose worker"):
            self.may_repeat = True
            worker.kill(witness=what == "kill worker")
        elif what == "give up":
            self.may_repeat = self.given_up = True
            worker.give_up()
        elif what in ("TERM", "QUIT"):
            worker.signal(signal.SIGTERM if what == "TERM" else signal.SIGQUIT)
        elif what == "reload":
            worker.signal(signal.SIGHUP)
        elif what == "quiet":
            worker.command("quiet")

    def end(self) -> None:
        """Let the jobs end in good times."""
        self.sim.app.error = ""
        for name in ("stall", "be_away", "be_full"):
            getattr(self.sim.store, name)(0.0)
        self.sim.until(self.all_ended, "the end of all jobs")
        self.sim.run_for(60.0)

    def all_ended(self) -> bool:
        self.go_on()
        return all(job.state.finished for job in self.jobs)

    def check(self) -> None:
        """Check what must hold however it went."""
        sim = self.sim
        for job in self.jobs:
            record = job.refresh()
            asked = job.id in self.asked
            most = record.envelope.retries.max_attempts
            assert record.attempt <= most or not most, record
            if record.envelope.task in INNOCENT and not asked:
                assert record.state is State.SUCCEEDED, record
            if record.state is State.CANCELLED:
                assert asked, record
            whole = [run.succeeded for run in sim.runs(job)]
            if any(whole) and not (self.may_repeat or self.store_took_too_long()):
                assert whole.index(True) == len(whole) - 1, (record, whole)
        if not self.given_up:
            assert sim.overlaps() == []
        self.check_queue()
        # the worker sleeps, and is whole
        if not self.worker.ended:
            assert len(self.worker.processes) == self.shape["processes"]
        steps = sim.store.steps
        sim.run_for(100.0)
        assert sim.store.steps - steps <= 20

    def store_took_too_long(self) -> bool:
        return bool(self.sim.said("may run again"))

    def check_queue(self) -> None:
        """The counters of the queue are those of its records."""
        rows = [row for row in self.sim.mill.queues() if row.name == "default"]
        states = Counter(job.state for job in self.jobs)
        for row in rows:
            assert row.size == 0
            assert (row.succeeded, row.failed) == (states[State.SUCCEEDED], states[State.FAILED])


@settings(
    max_examples=int(os.environ.get("TIDEMILL_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
@given(shape=shapes, plan=events, seed=st.none() | st.integers(0, 1000))
def test_every_job_ends_once_whatever_happens(
    shape: dict[str, Any], plan: list[Any], seed: int | None
) -> None:
    # laws 3, 6, 8, 14
    with simulation() as sim:
        if seed is not None:
            sim.be_random(seed)
        story = Story(sim, shape)
        for pause, event in plan:
            sim.run_for(pause)
            note(f"{sim.now:.3f} {event}")
            story.act(*event)
        story.end()
        story.check()
