"""The storm: workers, producers and kills at random moments; afterwards every job is accounted for.

    python -m tests.faults.storm --seed 7 --kills 200 --broker redis

Several workers and producers share one store. Something is killed every fraction of a second: a
process, a supervisor, a whole worker, everything, by SIGKILL, SIGTERM or SIGINT; and the server,
where there is one, or one of those there are, which comes back with what it had written. Tasks are
short and long, sync and async; some hold the interpreter lock, some run past their timeout, some
cannot be interrupted. Most workers lack one of two tasks: its jobs are given back and tried again.
What was accepted and what ran stands in files written by single appends. At the end the store is
drained and :mod:`.checker` looks at what is left (case Q20). Where the broker forgets what is done,
as RabbitMQ does, :mod:`.ledger` looks whether all that was accepted ran. :mod:`.faults` adds the
misfortunes of servers: fail-overs, full disks, cut lines.
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

from checker import SETTLING, check, check_nothing_held  # noqa: E402
from declared_schedules import store_declared  # noqa: E402
from excuses import Excuses, Span, read_puts  # noqa: E402
from harness import Place, Worker, eventually, open_place  # noqa: E402
from ledger import FAILED, check_runs  # noqa: E402
from misfortunes import Series  # noqa: E402
from servers import Postgres, RabbitMQ, Redis, Server  # noqa: E402
from servers.http import JobServer  # noqa: E402
from storm_app import APP  # noqa: E402

from tidemill.brokers.contract.features import Feature  # noqa: E402

DRAIN = 0.4

MINUTE = 60.0
"""Seconds after the last blow in which nothing may be held any more that nobody works on."""

TRIES = 600.0
"""Seconds in which a job of an unknown task is tried twenty times, at least. At each try the worker
that lacks the task may be faster than the worker that has it."""

BLOW = 0.16
"""Seconds between two kills, on average."""

LEAST = 25
"""Jobs that are put after the last blow of a storm, at least."""

PATIENCE = 30
"""Seconds that a put waits for a server, or for a queue of it that takes nothing any more."""

SERVER_AWAY = 3.0
"""Seconds that a verdict may wait longer where the server is killed: until it is back and tried."""


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
        series: Series | None = None,
        pause: float = 0.04,
    ) -> None:
        self.place = place
        self.servers = servers
        self.series = series or Series()
        self.excuses = Excuses()
        self.features = place.mill.broker.features
        self.rng = random.Random(seed)
        self.kills: list[float] = []
        self.away: list[Span] = []  # from the kill of a server until it takes connections
        self.kinds: Counter[str] = Counter()
        self.workers: list[Worker] = []
        self.witness: Worker | None = None  # never struck: no death frees what it leaks
        self.producers: list[subprocess.Popen[bytes]] = []
        self._counts = workers, producers
        self._pause = pause  # of each producer, after a put

    def run(self, kills: int) -> dict[str, int]:
        """Rage, calm down, drain, check; the table of what was seen."""
        self.place.write(APP)
        if Feature.SCHEDULES in self.features:
            store_declared(self.place.module.mill)
        try:
            self._begin()
            self.witness = self.place.worker("--stuck-grace", str(DRAIN), slots=2)
            self._rage(kills)
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

    def _rage(self, kills: int) -> None:
        """Kill until the last misfortune is over, then wait for some more puts."""
        slowly = max(1.0, self.series.length / kills / BLOW) if kills else 1.0
        self.series.begin()
        while not self.series.over() or self.kinds.total() < kills:
            self._man()
            time.sleep(slowly * self.rng.uniform(0.02, 0.3))
            if kills:
                self._strike()
        self._man()
        put = functools.partial(self._has_put_since, time.time())
        eventually(put, "the puts after the last blow", 120, 0.1)

    def _has_put_since(self, calm: float) -> bool:
        """Whether LEAST jobs were put. On a slow machine no producer may live to its first put."""
        puts = [put for put in read_puts(self.place.notes()) if put.span.begin >= calm]
        return sum(len(put.ids) for put in puts if put.said == "accepted") >= LEAST

    def _begin(self) -> None:
        """With RabbitMQ: workers are up, and each queue is in use.

        One whose server is killed while it is made may be there for ever without a leader, or break
        the line of whoever uses it.
        """
        for server in self.servers[:1]:
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
        settling = SETTLING + SERVER_AWAY * len(self.servers)
        puts = read_puts(self.place.notes())
        self.excuses = Excuses(self.series.blows, puts, self.away, settling)
        accepted = [job_id for put in puts if put.said == "accepted" for job_id in put.ids]
        may_fail = [job_id for put in puts if put.said == "may-fail" for job_id in put.ids]
        if Feature.INSPECT not in self.features:
            if self.witness.process.poll() is None:
                self.witness.stop()
            server, kills = self.servers[0], self._all_kills()
            return check_runs(self.place, server, accepted, may_fail, kills, self.excuses)
        self.place.mill.schedules.pause("beat")
        self._drain(time.monotonic() + MINUTE)
        kills = self._all_kills()
        seen = check(self.place, accepted + may_fail, kills, settling, self.excuses)
        said = sum("no worker knows task" in worker.output for worker in self.place.workers)
        return {**seen, "workers that gave unknown jobs back": said}

    def _drain(self, until: float) -> None:
        """Run what is left. A minute after the last blow nothing may be held without a holder."""
        grace = "--stuck-grace", str(DRAIN)
        half = self.place.worker(*grace, env={"STORM_LACKS": "rare"}).wait_ready()
        whole = self.place.worker(*grace, slots=6).wait_ready()
        done, left = functools.partial(_has_ended, self.place), until - time.monotonic()
        with contextlib.suppress(AssertionError):  # more than fits into a minute: see below
            eventually(done, "the end of all jobs", left, 0.1)
        for worker in (half, whole):
            worker.stop()
        if self.witness.process.poll() is None:  # else it held the lock that a misfortune struck
            self._check_the_living()
            self.witness.stop()
        check_nothing_held(self.place)
        if not done():
            half = self.place.worker(*grace, env={"STORM_LACKS": "rare"}).wait_ready()
            self.place.drain(*grace, slots=6, standstill=TRIES)
            half.stop()

    def _check_the_living(self) -> None:
        """While a worker lives that has seen the whole storm: all it holds is what it runs.

        With its queues paused it ends what it runs, and then holds nothing.
        """
        mill = self.place.mill
        queues = [mill.queue(stats.name) for stats in mill.queues()]
        for queue in queues:
            queue.pause()
        idle = functools.partial(_runs_nothing, self.place)
        eventually(idle, "the end of all runs of paused queues", MINUTE / 2, 0.2)
        check_nothing_held(self.place)
        for queue in queues:
            queue.resume()

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
                    [sys.executable, file],
                    cwd=self.place.path,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "STORM_PAUSE": str(self._pause)},
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
            self._hit_server()
        else:
            self._hit(target, lambda: [one.kill_everything() for one in self.workers])

    def _hit_server(self) -> None:
        """Unless it has a misfortune at this moment."""
        if self.series.servers_at_rest.acquire(blocking=False):
            try:
                self._hit("server", self._restart_server)
            finally:
                self.series.servers_at_rest.release()

    def _restart_server(self) -> None:
        server = self.rng.choice(self.servers)
        if isinstance(server, RabbitMQ):
            server.sync()  # the newest queues would not survive, whatever the broker does
        killed = time.time()
        server.kill()
        self.kills.append(time.time())  # long after the blow began, and long before it is over
        time.sleep(self.rng.uniform(0.0, 0.5))
        server.start()
        self.away.append(Span(killed, time.time()))

    def _hit(self, kind: str, blow: Callable[[], object]) -> None:
        before = time.time()
        with contextlib.suppress(ProcessLookupError):
            blow()
        self.kills += [before, time.time()]
        self.kinds[kind] += 1

    def _ended(self, jobs: set[str]) -> bool:
        return jobs <= {line.id for line in self.place.ledger() if line.what == "end"}

    def _all_kills(self) -> list[float]:
        """Ours, and those by supervisors: of stuck processes, and at the end of their patience."""
        kills = [*self.kills, *self.place.killed]
        pattern = re.compile(r"^(\S+ \S+) .*worker process \d+ is killed\b", re.M)
        for worker in self.place.workers:
            for stamp in pattern.findall(worker.output):
                when = dt.datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
                kills.append(when.timestamp())
        return kills


def _has_ended(place: Place) -> bool:
    return not place.unfinished()


def _runs_nothing(place: Place) -> bool:
    return not any(stats.running for stats in place.mill.queues())


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
