"""The cost of rows of history to a drain.

    python benchmarks/history.py URL [GROUPS [JOBS [ROWS]]]
    python benchmarks/history.py URL worker [PAIRS [JOBS [TASKS [PROCESSES [SLOTS]]]]]

The first form measures steps of a store, the second form whole workers.

Settles and leases jobs in steps of JOBS jobs (50 unless told), as a worker does. Steps with ROWS
rows of 70 numbers (1 unless told) and steps without rows take turns at random in one store. After
each 200 steps comes the housekeeping, which sums added rows. Prints the median, over groups of 200
steps (GROUPS, 15 unless told), of the cost of the rows in percent of a step, with the housekeeping.
Costs are processor time of this process and of the server, which must run on this machine (Linux):
other work disturbs the clock on the wall more.

With ``worker``, real workers (``tidemill worker --burst``) drain JOBS jobs (20,000 unless told) of
TASKS tasks (1) that do nothing, with PROCESSES processes (2) of SLOTS slots (8). In each of the
PAIRS pairs (10) one worker keeps history and the other keeps none, in random order. A worker that
keeps history sends three rows for each task and step, and snapshots of the queues. Costs are
processor time of the worker with all its processes, and of the server, with the housekeeping after
the drain. The cost of a worker without jobs is taken off both sides, so that starts do not count.
The time on the clock is printed, too; trust it only where nothing else runs.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import psutil

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.contract.history_rows import HOUR, MINUTE, HistoryRow, join_name
from tidemill.brokers.contract.store import Store
from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock, new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Owner, Verdict

STEPS = 200
BODY = b"x" * 100


def rows_of(count: int) -> list[HistoryRow]:
    """Rows with 70 numbers."""
    at = int(clock.wall())
    numbers = tuple((n * 7919) % 50 if n % 3 else n * 1000 for n in range(70))
    spans = [(MINUTE, "a"), (HOUR, "a"), (MINUTE, "b"), (HOUR, "b")]
    return [
        HistoryRow("task", join_name("q", f"app.{name}", "v1"), span, at - at % span, numbers)
        for span, name in spans[:count]
    ]


def server_processes(broker: Store) -> list[int]:
    """The processes of the server that work for this store."""
    if isinstance(broker, RedisBroker):
        info = broker._lines.ask(b"INFO", b"server").decode()
        return [int(info.partition("process_id:")[2].split()[0])]
    if isinstance(broker, PostgresBroker):
        backends = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        return [pid for (pid,) in broker._session.query(backends)]
    return []


class Drain:
    """Jobs of one store, drained in steps."""

    def __init__(self, broker: Store, jobs: int, rows: int) -> None:
        self._broker = broker
        self._jobs = jobs
        self._owner = Owner(id=f"bench-{new_id()}", kind="worker", name="bench")
        self._rows = rows_of(rows)
        self._reply = Reply()
        self._files: list[Path] = []
        broker.attach(self._owner)

    def cost(self) -> float:
        """The cost of the rows in percent, by one group of steps."""
        for _ in range(STEPS + 1):
            jobs = [Envelope(id=new_id(), task="app.a", body=BODY) for _ in range(self._jobs)]
            self._broker.put(jobs)
        if not self._reply.leases:
            self._reply = self._broker.exchange(Step(self._owner.id, want=Want(self._jobs)))
        pids = server_processes(self._broker)
        self._files = [
            path for pid in pids for path in Path(f"/proc/{pid}").glob("task/*/schedstat")
        ]
        gc.collect()
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(STEPS):
            counts = random.random() < 0.5
            times[counts].append(self._spent(self._step(counts)))
        first, second = self._spent(self._broker.tick), self._spent(self._broker.tick)
        later = max(0.0, first - second) / len(times[True])
        without, with_rows = (statistics.median(times[counts]) for counts in (False, True))
        return 100 * ((with_rows + later) / without - 1)

    def _step(self, counts: bool) -> Callable[[], None]:
        verdicts = [Verdict(lease.token, Outcome.SUCCESS) for lease in self._reply.leases]
        history = self._rows if counts else ()
        step = Step(self._owner.id, verdicts, Want(self._jobs), history=history)

        def make() -> None:
            self._reply = self._broker.exchange(step)

        return make

    def _spent(self, act: Callable[[], object]) -> float:
        """Seconds of a processor that a call takes."""
        before, begun = self._server_time(), time.process_time()
        act()
        ours = time.process_time() - begun
        return ours + self._server_time() - before

    def _server_time(self) -> float:
        return sum(int(path.read_text().split()[0]) for path in self._files if path.exists()) / 1e9


# -- whole workers --------------------------------------------------------------------------------

APP = """
import os
from tidemill import Tidemill

mill = Tidemill(os.environ["BENCH_URL"])
for number in range(int(os.environ["BENCH_TASKS"])):
    @mill.task(name=f"bench.{number}")
    def nothing(): ...
"""

WORKER = """
import sys
from tidemill.cli import main
from tidemill.worker.parts import Snapshots
from tidemill.worker.history import WorkerHistory

if sys.argv.pop(1) == "without":
    WorkerHistory.on = property(lambda self: False, lambda self, value: None)
    Snapshots.due, Snapshots.end = float("inf"), lambda self, broker: None
main()
"""


class Spent(NamedTuple):
    """Seconds of processors, and of the clock."""

    processor: float
    clock: float


def _nothing() -> None: ...


class Workers:
    """Workers that drain one store, one after the other."""

    def __init__(self, url: str, tasks: int, processes: int, slots: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._options = ["-p", str(processes), "-c", str(slots), "--burst", "--log-level", "error"]
        self._env = {**os.environ, "BENCH_URL": url, "BENCH_TASKS": str(tasks)}
        (Path(self._folder.name) / "bench_app.py").write_text(APP)
        (Path(self._folder.name) / "bench_worker.py").write_text(WORKER)
        self._mill = Tidemill(url)
        self._calls = [self._mill.task(name=f"bench.{n}")(_nothing) for n in range(tasks)]
        self._server = self._find_server()

    def close(self) -> None:
        """Close the store, and delete the app."""
        self._mill.close()
        self._folder.cleanup()

    def drain(self, jobs: int, *, history: bool) -> Spent:
        """What one worker, its server and the housekeeping spend on some jobs."""
        broker = self._mill.broker
        for start in range(0, jobs, 1000):
            some = range(start, min(start + 1000, jobs))
            self._mill.enqueue_many([self._calls[n % len(self._calls)].call() for n in some])
        broker.tick()
        before, began = self._spent(), time.perf_counter()
        command = [sys.executable, "bench_worker.py", "with" if history else "without"]
        command += ["worker", "bench_app:mill", *self._options]
        subprocess.run(command, cwd=self._folder.name, env=self._env, check=True)
        clock = time.perf_counter() - began
        broker.tick()
        spent = self._spent() - before
        assert not sum(row.size for row in broker.stats()), "the worker left jobs"
        return Spent(spent, clock)

    def _spent(self) -> float:
        """Seconds of a processor: of this process, its children that ended, and the server."""
        own = os.times()
        total = own.user + own.system + own.children_user + own.children_system
        if self._server is not None:
            for process in [self._server, *self._server.children(recursive=True)]:
                total += sum(process.cpu_times()[:4])
        return total

    def _find_server(self) -> psutil.Process | None:
        """The server's main process."""
        pids = server_processes(self._mill.broker)
        if not pids:
            return None
        process = psutil.Process(pids[0])
        above = process.parent()
        while above is not None and above.name() == process.name():
            process, above = above, above.parent()
        return process


def compare_workers(
    url: str,
    pairs: int = 10,
    jobs: int = 20_000,
    tasks: int = 1,
    processes: int = 2,
    slots: int = 8,
) -> None:
    """Measure workers with and without history in turn, and print the cost of history."""
    workers = Workers(url, tasks, processes, slots)
    workers.drain(jobs, history=True)  # warms up
    costs: list[Spent] = []
    for _ in range(pairs):
        found: dict[str, Spent] = {}
        turns = ["with", "without", "idle"]
        random.shuffle(turns)
        for turn in turns:
            count = 0 if turn == "idle" else jobs
            found[turn] = workers.drain(count, history=turn == "with")
        pure = {
            turn: [one - idle for one, idle in zip(spent, found["idle"], strict=True)]
            for turn, spent in found.items()
        }
        ratios = zip(pure["with"], pure["without"], strict=True)
        costs.append(Spent(*(100 * (one / other - 1) for one, other in ratios)))
        print(
            f"  {jobs / pure['with'][1]:,.0f} jobs/s with history, "
            f"{jobs / pure['without'][1]:,.0f} without; processor {costs[-1].processor:+.1f} %",
            flush=True,
        )
    workers.close()
    print(f"{url.split(':')[0]}: the history of {tasks} tasks costs a worker", end=" ")
    columns = zip(*costs, strict=True)
    for what, values in zip(("of processors", "on the clock"), columns, strict=True):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{middle:+.1f} % {what} (quartiles {low:+.1f} and {high:+.1f} %)", end="; ")
    print(f"{pairs} pairs of {jobs:,} jobs", flush=True)


def main(url: str, groups: int = 15, jobs: int = 50, rows: int = 1) -> None:
    """Measure and print."""
    broker = open_broker(url)
    drain = Drain(broker, jobs, rows)
    costs = [drain.cost() for _ in range(groups + 1)][1:]  # the first group warms up
    broker.close()
    low, middle, high = statistics.quantiles(costs, n=4)
    print(
        f"{url.split(':')[0]}: {rows} rows in each step of {jobs} jobs cost {middle:+.1f} % "
        f"(quartiles {low:+.1f} and {high:+.1f} %)",
        flush=True,
    )


if __name__ == "__main__":
    words = sys.argv[2:]
    measure = compare_workers if words[:1] == ["worker"] else main
    measure(sys.argv[1], *map(int, words[measure is compare_workers :]))
