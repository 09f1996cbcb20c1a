"""The storm: workers, producers and kills at random moments; afterwards every job is accounted for.

    python -m tests.faults.storm --seed 7 --kills 200 --broker redis

Several workers and producers share one store. Something is killed every fraction of a second: a
process, a supervisor, a whole worker, everything, by SIGKILL, SIGTERM or SIGINT; and the server,
where there is one, or one of those there are, which comes back with what it had written. Tasks are
short and long, sync and async; some hold the interpreter lock, some run past their timeout, some
cannot be interrupted. Most workers lack one of two tasks: its jobs are set aside and brought back.
What was accepted and what ran stands in files written by single appends. At the end the store is
drained and :mod:`.checker` looks at what is left (case Q20). Where the broker forgets what is done,
as RabbitMQ does, :mod:`.ledger` looks whether all that was accepted ran.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from checker import SETTLING, check  # noqa: E402
from harness import Place, Worker, eventually, open_place  # noqa: E402
from ledger import FAILED, check_runs  # noqa: E402
from servers import Postgres, RabbitMQ, Redis, Server  # noqa: E402
from servers.http import JobServer  # noqa: E402

from tidemill.brokers.base import Feature  # noqa: E402

DRAIN = 0.4

PATIENCE = 30
"""Seconds that a put waits for a server, or for a queue of it that takes nothing any more."""

SERVER_AWAY = 3.0
"""Seconds that a verdict may wait longer where the server is killed: until it is back and tried."""

APP = """
from tidemill import Limit

forever = Retries(1000, delay=0)
keeps = not mill.url.startswith("amqp")  # jobs that are done, schedules, limits
limited = keeps and not mill.url.startswith("postgresql")  # which has no limits
each = {"limit": Limit(concurrency=2, key=lambda n: n % 3)} if limited else {}

@mill.task(queue="slow", retries=forever, **each)
def bounded(n):
    begin(); time.sleep(0.02); end()

@mill.task(queue="quick", retries=forever)
def quick(n): begin(); end()

@mill.task(queue="quick", retries=forever)
def beat(): begin(); end()

if keeps:
    mill.schedule("beat", beat.call(), every=0.2, catch_up=True)

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

def sometimes(function):
    # A task that some workers do not know, where the store sets its jobs aside.
    if keeps and os.environ.get("STORM_LACKS") == function.__name__:
        return function
    return mill.task(queue="quick", retries=forever)(function)

@sometimes
def rare(n): begin(); end()

@sometimes
def scarce(n): begin(); end()

@mill.task(queue="slow", retries=Retries(0))
def fails(): raise ValueError

def produce():
    n = 0
    while not os.path.exists(HERE + "/enough"):
        calls = [quick.call(n + i) for i in range(12)] + [slow.call(n + i) for i in range(4)]
        calls += [later.call(n + i) for i in range(4)]
        calls += [bounded.call(n + i) for i in range(3)]
        calls += [task.call(n + i) for task in (rare, scarce) for i in range(3)]
        if n % 5 == 0:
            calls += [holds.call(n)]
        stuck = [hangs.call(n // 20), spins.call(n // 20)] if n % 20 == 0 else []
        ids = [job.id for job in mill.enqueue_many(calls + stuck)]
        note("accepted", *ids[:len(calls)])
        note("may-fail", *ids[len(calls):])
        n += 1
        time.sleep(0.04)
        note("accepted", quick.enqueue(n).id)  # alone, it is handed to who sleeps
        time.sleep(0.04)

if __name__ == "__main__":
    produce()
"""


class Storm:
    """One storm on one place."""

    def __init__(
        self,
        place: Place,
        seed: int,
        *,
        workers: int = 2,
        producers: int = 2,
        servers: Sequence[Server] = (),
    ) -> None:
        self.place = place
        self.servers = servers
        self.features = place.mill.broker.features
        self.rng = random.Random(seed)
        self.kills: list[float] = []
        self.kinds: Counter[str] = Counter()
        self.workers: list[Worker] = []
        self.producers: list[subprocess.Popen[bytes]] = []
        self._counts = workers, producers

    def run(self, kills: int) -> dict[str, int]:
        """Rage, calm down, drain, check; the table of what was seen."""
        self.place.write(APP)
        if Feature.SCHEDULES in self.features:
            self.place.module.mill.schedules.store()
        try:
            self._begin()
            while self.kinds.total() < kills:
                self._man()
                time.sleep(self.rng.uniform(0.02, 0.3))
                self._strike()
            (self.place.path / "enough").touch()
            for producer in self.producers:
                producer.wait(PATIENCE + 30)
        finally:
            for producer in self.producers:
                producer.kill()
                producer.wait()
        for worker in self.workers:
            if worker.process.poll() is None:
                self._hit("end", worker.kill_everything)
        blows = {"blows": self.kinds.total(), **self.kinds}
        return {**self._settle(), **blows}

    def _begin(self) -> None:
        """With RabbitMQ: workers are up, and each queue is in use.

        One whose server is killed while it is made may be there for ever without a leader, or break
        the line of whoever uses it.
        """
        for server in self.servers:
            if isinstance(server, RabbitMQ):
                tasks = self.place.module
                tasks.fails.enqueue()
                first = {task.enqueue(1).id for task in (tasks.quick, tasks.slow, tasks.later)}
                self._man(producers=0)
                eventually(functools.partial(self._ended, first), "the first jobs", 60, 0.1)
                failed = functools.partial(_has_failed, server)
                eventually(failed, "the first that failed", 60, 0.1)

    def _settle(self) -> dict[str, int]:
        """Run what is left, and look at everything; what was seen."""
        accepted, may_fail = self._noted("accepted"), self._noted("may-fail")
        if Feature.INSPECT not in self.features:
            [server] = self.servers
            return check_runs(self.place, server, accepted, may_fail, self._all_kills())
        self.place.mill.schedules.pause("beat")
        grace = "--stuck-grace", str(DRAIN)
        half = self.place.worker(*grace, env={"STORM_LACKS": "rare"}).wait_ready()
        self.place.drain(*grace, slots=6, limit=300.0)
        half.stop()
        settling = SETTLING + SERVER_AWAY * len(self.servers)
        seen = check(self.place, accepted + may_fail, self._all_kills(), settling)
        said = sum("are set aside" in worker.output for worker in self.place.workers)
        return {**seen, "workers that set jobs aside": said}

    def _man(self, producers: int | None = None) -> None:
        """Start whoever is missing."""
        workers = self._counts[0]
        producers = self._counts[1] if producers is None else producers
        self.workers = [worker for worker in self.workers if worker.process.poll() is None]
        while len(self.workers) < workers:
            options = ["--stuck-grace", str(DRAIN), "--shutdown-timeout", "1"]
            slots = self.rng.choice([1, 3])
            env = {"STORM_LACKS": self.rng.choice(["rare", "scarce", ""])}
            self.workers.append(self.place.worker(*options, processes=2, slots=slots, env=env))
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
            ["process", "supervisor", "producer", "worker", "everything", "server"],
            [8, 4, 3, 2, 1, 4 if self.servers else 0],
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
        elif target == "server":
            self._hit(target, self._restart_server)
        else:
            self._hit(target, lambda: [one.kill_everything() for one in self.workers])

    def _restart_server(self) -> None:
        server = self.rng.choice(self.servers)
        if isinstance(server, RabbitMQ):
            server.sync()  # the newest queues would not survive, whatever the broker does
        server.kill()
        self.kills.append(time.time())  # long after the blow began, and long before it is over
        time.sleep(self.rng.uniform(0.0, 0.5))
        server.start()

    def _hit(self, kind: str, blow: Callable[[], object]) -> None:
        before = time.time()
        with contextlib.suppress(ProcessLookupError):
            blow()
        self.kills += [before, time.time()]
        self.kinds[kind] += 1

    def _noted(self, what: str) -> list[str]:
        lines = [line.split() for line in self.place.notes() if line.startswith(f"{what} ")]
        return [job_id for line in lines for job_id in line[1:]]

    def _ended(self, jobs: set[str]) -> bool:
        return jobs <= {line.id for line in self.place.ledger() if line.what == "end"}

    def _all_kills(self) -> list[float]:
        """Ours, and those by supervisors: of stuck processes, and at the end of their patience."""
        kills = [*self.kills, *self.place.killed]
        pattern = re.compile(r"^(\S+ \S+) .*worker process \d+ is killed$", re.M)
        for worker in self.place.workers:
            for stamp in pattern.findall(worker.output):
                when = dt.datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
                kills.append(when.timestamp())
        return kills


def _has_failed(server: RabbitMQ) -> bool:
    return server.counts().get(FAILED, 0) > 0


def storm(path: Path, seed: int, kills: int, broker: str = "lmdb") -> dict[str, int]:
    """One storm in the directory ``path``, on a broker."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        url = SERVERS[broker](servers) if broker != "lmdb" else ""
        for server in servers:
            stack.callback(server.close)
        place = stack.enter_context(open_place(path, url))
        storm = Storm(place, seed, servers=servers)
        try:
            return storm.run(kills)
        finally:
            (path / "kills").write_text("".join(f"{moment:.3f}\n" for moment in storm.kills))


def _redis(servers: list[Server]) -> str:
    servers.append(server := Redis(durable=True))
    return f"{server.url}?owner_lease=3&patience={PATIENCE}"


def _postgres(servers: list[Server]) -> str:
    servers.append(server := Postgres())
    return f"{server.url()}?migrate=1&owner_lease=3&patience={PATIENCE}"


def _rabbitmq(servers: list[Server]) -> str:
    servers.append(server := RabbitMQ())
    return f"{server.url}?patience={PATIENCE}"


def _http(servers: list[Server], where: str = "") -> str:
    servers.append(server := JobServer("--quiet", where=where))
    return f"{server.url}?owner_lease=3&patience={PATIENCE}"


SERVERS: dict[str, Callable[[list[Server]], str]] = {
    "redis": _redis,
    "postgresql": _postgres,
    "rabbitmq": _rabbitmq,
    "http": _http,
    "http+redis": lambda servers: _http(servers, _redis(servers)),
    "http+postgresql": lambda servers: _http(servers, _postgres(servers)),
}
"""Brokers whose servers are killed, too: how to start some that lose nothing they have accepted."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--broker", choices=["lmdb", *SERVERS], default="lmdb")
    options = parser.parse_args()
    print(f"storm: {options.broker}, seed {options.seed}, {options.kills} kills", flush=True)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    path = folder / "p"
    path.mkdir()
    try:
        table = storm(path, options.seed, options.kills, options.broker)
    except AssertionError as error:
        print(f"FAILED with seed {options.seed}, its files are in {path}: {error}")
        return 1
    shutil.rmtree(folder)
    for what, count in table.items():
        print(f"{count:8d}  {what}")
    print(f"all laws held, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
