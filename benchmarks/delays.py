"""How late RabbitMQ's delayed jobs begin, beside what its server takes to hand them on by itself.

    python benchmarks/delays.py [ROUNDS]

- *jobs*: 2,000 that are due at one instant, put in one call, until their starts in a worker of two
  processes with eight threads each; and 100 that come due one after the other, 20 a second.
- *by hand*: 2,000 messages in one quorum queue, each of which expires at the same instant, goes to
  another as tidemill's do (at least once), and is heard by one bare consumer. No client can have
  them before the server has handed them on.

Milliseconds after the due time, and microseconds of the server's processors for each message from
then on. Each round does all of it on the same server, so that other work falls on all alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pika
import psutil
from marks import Marks
from processes import stop
from rabbitmq import private_rabbitmq

COUNT, ALONE = 2_000, 100
LEAD = 6.0
"""Seconds from the first put until what was put is due."""

Figures = dict[str, float]


def late(found: list[float]) -> Figures:
    """Percentiles of what is late by so many milliseconds."""
    found, last = sorted(found), len(found) - 1
    return {f"p{share}": found[min(last, share * len(found) // 100)] for share in (50, 99)}


class Clock:
    """The processor time of a server over what it is about from an instant on."""

    def __init__(self, pid: int, due: float) -> None:
        self._process = psutil.Process(pid)
        time.sleep(max(0.0, due - time.time() - 0.2))
        self._start = self._seconds()

    def _seconds(self) -> float:
        return sum(self._process.cpu_times()[:2])

    def each(self, count: int) -> float:
        """Microseconds for each of so many."""
        return (self._seconds() - self._start) / count * 1e6


def by_hand(url: str, pid: int) -> Figures:
    """One hop, one queue, one consumer."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    kept = {"x-queue-type": "quorum"}
    waits = kept | {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "due",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    channel.queue_declare("due", durable=True, arguments=kept)
    channel.queue_declare("waits", durable=True, arguments=waits)
    heard: list[float] = []
    hearing = threading.Thread(target=_hear, args=(url, heard), daemon=True)
    hearing.start()
    due = time.time() + LEAD
    for _ in range(COUNT):
        rest = str(max(1, int((due - time.time()) * 1000) + 1))
        properties = pika.BasicProperties(delivery_mode=2, expiration=rest)
        channel.basic_publish("", "waits", repr(due).encode() + bytes(200), properties)
    assert time.time() < due, "it took too long to put them"
    clock = Clock(pid, due)
    hearing.join(60)
    figures = late(heard) | {"server": clock.each(COUNT)}
    connection.close()
    return figures


def _hear(url: str, heard: list[float]) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=COUNT)
    for method, _, body in channel.consume("due"):
        heard.append((time.time() - float(body.rstrip(b"\0"))) * 1000)
        if len(heard) % 100 == 0:
            channel.basic_ack(method.delivery_tag, multiple=True)
        if len(heard) == COUNT:
            break
    connection.close()


def jobs(folder: Path, pid: int) -> tuple[Figures, Figures]:
    """Those at one instant, and those one after the other."""
    from systems import tidemill_rabbitmq as system  # which asks where its server is

    marks, mill, noop = Marks(folder), system.mill, system.noop
    workers = system.start_workers()
    try:
        system.enqueue_many(100)
        while marks.count() < 100:
            time.sleep(0.02)
        due = time.time() + LEAD
        mill.enqueue_many(noop.using(at=due).call(due) for _ in range(COUNT))
        assert time.time() < due, "it took too long to put them"
        clock = Clock(pid, due)
        while marks.count() < 100 + COUNT:
            time.sleep(0.02)
        server = clock.each(COUNT)
        first = time.time() + 1.0
        for number in range(ALONE):
            system.enqueue_at(first + number * 0.05 + 0.007 * (number % 3))
        while marks.count() < 100 + COUNT + ALONE:
            time.sleep(0.02)
    finally:
        stop(workers)
        system.stop()
    found = [(stamp, (start - stamp) * 1000) for stamp, start in marks.read() if stamp]
    assert all(ms > -1 for _, ms in found), "one was early"
    together = late([ms for stamp, ms in found if stamp == due]) | {"server": server}
    return together, late([ms for stamp, ms in found if stamp != due])


def main() -> None:
    """Measure in rounds; each with its server's queues made anew."""
    rounds = int(sys.argv[1]) if sys.argv[1:] else 3
    kinds = ("jobs at one instant", "by hand at one instant", "jobs one by one")
    rows: dict[str, list[Figures]] = {kind: [] for kind in kinds}
    with (
        tempfile.TemporaryDirectory(prefix="delays-") as tmp,
        private_rabbitmq(Path(tmp)) as server,
    ):
        assert server is not None, "there is no rabbitmq-server"
        for _ in range(rounds):
            server.flush()
            rows[kinds[1]].append(by_hand(server.url, server.pid))
            together, single = _in_child(server.url, server.pid, Path(tmp))
            rows[kinds[0]].append(together)
            rows[kinds[2]].append(single)
    print(f"medians of {rounds}, load {os.getloadavg()[0]:.1f} at the end")
    for kind, found in rows.items():
        said = {name: statistics.median(row[name] for row in found) for name in found[0]}
        print(f"{kind:24}", " ".join(f"{name} {value:,.0f}" for name, value in said.items()))


def _in_child(url: str, pid: int, tmp: Path) -> tuple[Figures, Figures]:
    """The app is imported where its server's address is known, and each time anew."""
    with tempfile.TemporaryDirectory(dir=tmp) as folder:
        here = Path(__file__).resolve().parent
        environment = os.environ | {
            "BENCH_TMP": folder,
            "BENCH_CAPACITY": "100000",
            "BENCH_RABBITMQ_URL": url,
            "PYTHONPATH": f"{here}{os.pathsep}{here.parent / 'src'}",
        }
        told = subprocess.run(
            [sys.executable, __file__, "jobs", folder, str(pid)],
            env=environment, stdout=subprocess.PIPE, check=True, timeout=180,
        )  # fmt: skip
        together, single = json.loads(told.stdout)
        return together, single


if __name__ == "__main__":
    if sys.argv[1:2] == ["jobs"]:
        print(json.dumps(jobs(Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
