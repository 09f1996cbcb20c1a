"""The storm: workers, producers and kills at random moments; afterwards every job is accounted for.

    python -m tests.faults.storm --seed 7 --kills 200

Several workers and producers share one directory. Something is killed every fraction of a second:
a process, a supervisor, a whole worker, everything, by SIGKILL, SIGTERM or SIGINT. Tasks are short
and long, sync and async; some hold the interpreter lock, some run past their timeout, some cannot
be interrupted. What was accepted and what ran stands in files written by single appends. At the end
the store is drained and :mod:`.checker` looks at what is left (case Q20).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from checker import check  # noqa: E402
from harness import Place, Worker, open_place  # noqa: E402

DRAIN = 0.4

APP = """
forever = Retries(1000, delay=0)

@mill.task(queue="quick", retries=forever)
def quick(n): begin(); end()

@mill.task(queue="slow", retries=forever)
def slow(n):
    begin(); time.sleep(0.02 * (n % 10)); end()

@mill.task(queue="async", retries=forever)
async def later(n):
    begin(); await asyncio.sleep(0.01 * (n % 10)); end()

@mill.task(queue="slow", retries=forever)
def holds(n):
    begin(); hold_gil(0.15); end()

@mill.task(queue="slow", retries=Retries(2, delay=0), timeout=0.2)
def hangs(n):
    begin()
    try:
        time.sleep(20 if n % 2 else 0.1)
    finally:
        end()

@mill.task(queue="slow", retries=Retries(2, delay=0), timeout=0.2)
def spins(n):
    begin()
    try:
        until = time.time() + (20 if n % 2 else 0.1)
        while time.time() < until: pass
    finally:
        end()

def produce():
    n = 0
    while not os.path.exists(HERE + "/enough"):
        calls = [quick.call(n + i) for i in range(12)] + [slow.call(n + i) for i in range(4)]
        calls += [later.call(n + i) for i in range(4)]
        if n % 5 == 0:
            calls += [holds.call(n)]
        if n % 20 == 0:
            calls += [hangs.call(n // 20), spins.call(n // 20)]
        jobs = mill.enqueue_many(calls)
        note("accepted", *[job.id for job in jobs])
        n += 1
        time.sleep(0.08)

if __name__ == "__main__":
    produce()
"""


class Storm:
    """One storm on one place."""

    def __init__(self, place: Place, seed: int, *, workers: int = 2, producers: int = 2) -> None:
        self.place = place
        self.rng = random.Random(seed)
        self.kills: list[float] = []
        self.kinds: Counter[str] = Counter()
        self.workers: list[Worker] = []
        self.producers: list[subprocess.Popen[bytes]] = []
        self._counts = workers, producers

    def run(self, kills: int) -> dict[str, int]:
        """Rage, calm down, drain, check; the table of what was seen."""
        self.place.write(APP)
        try:
            while self.kinds.total() < kills:
                self._man()
                time.sleep(self.rng.uniform(0.02, 0.3))
                self._strike()
            (self.place.path / "enough").touch()
            for producer in self.producers:
                producer.wait(30)
        finally:
            for producer in self.producers:
                producer.kill()
                producer.wait()
        for worker in self.workers:
            if worker.process.poll() is None:
                self._hit("end", worker.kill_everything)
        self.place.drain("--drain", str(DRAIN), slots=6, limit=300.0)
        blows = {"blows": self.kinds.total(), **self.kinds}
        return {**check(self.place, self._accepted(), self._all_kills()), **blows}

    def _man(self) -> None:
        """Start whoever is missing."""
        workers, producers = self._counts
        self.workers = [worker for worker in self.workers if worker.process.poll() is None]
        while len(self.workers) < workers:
            options = ["--drain", str(DRAIN), "--shutdown-timeout", "1"]
            slots = self.rng.choice([1, 3])
            self.workers.append(self.place.worker(*options, processes=2, slots=slots))
        self.producers = [producer for producer in self.producers if producer.poll() is None]
        while len(self.producers) < producers:
            file = f"{self.place.app}.py"
            self.producers.append(
                subprocess.Popen(
                    [sys.executable, file], cwd=self.place.path, stderr=subprocess.DEVNULL
                )
            )

    def _strike(self) -> None:
        worker = self.rng.choice(self.workers)
        signum = self.rng.choices([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], [6, 2, 1])[0]
        target = self.rng.choices(
            ["process", "supervisor", "producer", "worker", "everything"], [8, 4, 3, 2, 1]
        )[0]
        if target == "process":
            children = worker.children()
            if children:
                pid = self.rng.choice(children).pid
                self._hit(f"{target} {signum.name}", lambda: os.kill(pid, signum))
        elif target == "supervisor":
            self._hit(f"{target} {signum.name}", lambda: worker.send(signum))
        elif target == "producer":
            self._hit(target, self.rng.choice(self.producers).kill)
        elif target == "worker":
            self._hit(target, worker.kill_everything)
        else:
            self._hit(target, lambda: [one.kill_everything() for one in self.workers])

    def _hit(self, kind: str, blow: Callable[[], object]) -> None:
        before = time.time()
        with contextlib.suppress(ProcessLookupError):
            blow()
        self.kills += [before, time.time()]
        self.kinds[kind] += 1

    def _accepted(self) -> list[str]:
        lines = [line.split() for line in self.place.notes() if line.startswith("accepted")]
        return [job_id for line in lines for job_id in line[1:]]

    def _all_kills(self) -> list[float]:
        """Ours, and those by supervisors: of stuck processes, and at the end of their patience."""
        kills = [*self.kills, *self.place.killed]
        pattern = re.compile(r"^(\S+ \S+) .*worker process \d+ is killed$", re.M)
        for worker in self.place.workers:
            for stamp in pattern.findall(worker.output):
                when = dt.datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
                kills.append(when.timestamp())
        return kills


def storm(path: Path, seed: int, kills: int) -> dict[str, int]:
    """One storm in the directory ``path``."""
    with open_place(path) as place:
        return Storm(place, seed).run(kills)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=200)
    options = parser.parse_args()
    print(f"storm: seed {options.seed}, {options.kills} kills", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        path = Path(folder) / "p"
        path.mkdir()
        try:
            table = storm(path, options.seed, options.kills)
        except AssertionError as error:
            print(f"FAILED with seed {options.seed}: {error}")
            return 1
    for what, count in table.items():
        print(f"{count:8d}  {what}")
    print(f"all laws held, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
