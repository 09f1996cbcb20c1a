"""What an open transaction costs the queues of a PostgreSQL database, step by step.

    python benchmarks/postgres_horizon.py --jobs 200000

Jobs are put and drained in batches of 500, first without and then beside a transaction that stays
open. After each part: the median time of a put of one job, and of a step that settles a job and
leases the next, with 1,000 jobs ready; and how many rows a claim passes before the first job.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import psycopg
from processes import private_postgres

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Step, Want
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner, Verdict

BODY = b"\x92\x90\x80" + b"x" * 60
BACKLOG = 1000
LOOKS = 21


def put(broker: Broker, count: int) -> None:
    """As many jobs, 500 at a time."""
    for _ in range(count // 500):
        broker.put([Envelope(id=new_id(), task="t", body=BODY) for _ in range(500)])


def drain(broker: Broker, count: int, batch: int = 500) -> list[float]:
    """Lease and settle as many; the seconds of each step."""
    took: list[float] = []
    verdicts: list[Verdict] = []
    want = Want(batch, ("default",), Mode.FAIR)
    for _ in range(count // batch):
        start = time.perf_counter()
        leases = broker.exchange(Step("o", verdicts=verdicts, want=want)).leases
        took.append(time.perf_counter() - start)
        verdicts = [Verdict(lease.token, 0, started=1.0, ended=2.0) for lease in leases]
    broker.exchange(Step("o", verdicts=verdicts))
    return took


def look(broker: Broker, conn: psycopg.Connection, what: str) -> None:
    """Print how long puts and steps take now."""
    puts = []
    for _ in range(LOOKS):
        start = time.perf_counter()
        broker.put([Envelope(id=new_id(), task="t", body=BODY)])
        puts.append(time.perf_counter() - start)
    steps = drain(broker, LOOKS, 1)
    first = "SELECT FROM tidemill.ready ORDER BY line, rank, seq LIMIT 1"
    [([plan],)] = conn.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {first}").fetchall()
    passed = int(plan["Plan"]["Plans"][0].get("Heap Fetches", 0))
    put_ms, step_ms = (statistics.median(times) * 1000 for times in (puts, steps))
    times = f"put {put_ms:6.1f} ms  step {step_ms:6.1f} ms"
    print(f"{what:<44} {times}  passed {passed:>8,}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--parts", type=int, default=4)
    given = parser.parse_args()
    part = given.jobs // given.parts // 500 * 500
    with tempfile.TemporaryDirectory(prefix="horizon-") as folder:
        Path(folder).chmod(0o711)
        with private_postgres(Path(folder)) as server:
            assert server is not None, "PostgreSQL is not installed"
            broker = open_broker(f"{server.url}?migrate=1&patience=60")
            broker.attach(Owner(id="o", name="w"))
            conn = psycopg.connect(server.url, autocommit=True)
            put(broker, BACKLOG)
            for held in (False, True):
                beside = psycopg.connect(server.url)
                if held:
                    conn.execute("VACUUM tidemill.ready")
                    beside.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                    beside.execute("SELECT count(*) FROM tidemill.queue")
                name = "beside a transaction" if held else "alone"
                look(broker, conn, f"{name}, fresh")
                for n in range(given.parts):
                    put(broker, part)
                    drain(broker, part)
                    look(broker, conn, f"{name}, {(n + 1) * part:,} jobs later")
                beside.close()
            conn.execute("VACUUM tidemill.ready")
            look(broker, conn, "it has ended, cleared away")
            conn.close()
            broker.close()


if __name__ == "__main__":
    main()
