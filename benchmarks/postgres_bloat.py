"""How large PostgreSQL's tables grow, and how fast they are drained, over many jobs of one owner.

    python benchmarks/postgres_bloat.py --jobs 1000000

A small drain on an empty store first, for comparison; then a backlog of all jobs, drained while
jobs go on being put; table sizes on the way and after autovacuum has had its time.
"""

from __future__ import annotations

import argparse
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
WANT = Want(500, ("default",), Mode.FAIR)
TABLES = ("job", "ready", "lease", "done", "tally", "pulse", "call")


def put(broker: Broker, count: int) -> float:
    """Jobs in thousands; how many a second."""
    start = time.perf_counter()
    for _ in range(count // 1000):
        now = time.time()
        broker.put([Envelope(id=new_id(), task="t", body=BODY, created=now) for _ in range(1000)])
    return count / (time.perf_counter() - start)


def drain(broker: Broker, count: int) -> float:
    """Lease and settle as many; how many a second."""
    start, done = time.perf_counter(), 0
    verdicts: list[Verdict] = []
    while done < count:
        leases = broker.exchange(Step("o", verdicts=verdicts, want=WANT)).leases
        verdicts = [Verdict(lease.token, 0, started=1.0, ended=2.0) for lease in leases]
        done += len(leases)
        if not leases:
            break
    broker.exchange(Step("o", verdicts=verdicts))
    return count / (time.perf_counter() - start)


def sizes(conn: psycopg.Connection) -> str:
    """Megabytes by table, with indexes."""
    rows = conn.execute(
        "SELECT relname, pg_total_relation_size(oid) / 1e6 FROM pg_class "
        "WHERE relnamespace = 'tidemill'::regnamespace AND relname = ANY (%s)",
        [list(TABLES)],
    ).fetchall()
    found = dict(rows)
    return " ".join(f"{name} {found[name]:.0f}" for name in TABLES) + " MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1_000_000)
    jobs = parser.parse_args().jobs
    with tempfile.TemporaryDirectory(prefix="bloat-") as folder:
        Path(folder).chmod(0o711)
        with private_postgres(Path(folder)) as server:
            assert server is not None, "PostgreSQL is not installed"
            broker = open_broker(f"{server.url}?migrate=1")
            broker.attach(Owner(id="o", name="w"))
            conn = psycopg.connect(server.url, autocommit=True)
            put(broker, 20_000)
            print(f"drain of 20,000, nothing else there: {drain(broker, 20_000):,.0f}/s")
            print(f"put of {jobs:,}: {put(broker, jobs):,.0f}/s; {sizes(conn)}", flush=True)
            print(f"drain of 20,000 with {jobs:,} behind: {drain(broker, 20_000):,.0f}/s")
            for part in range(5):
                rate = drain(broker, jobs // 5 - 20_000)
                put(broker, 10_000)
                print(f"part {part + 1} of 5: {rate:,.0f}/s; {sizes(conn)}", flush=True)
            drain(broker, jobs)
            for _ in range(3):
                time.sleep(30)
                broker.tick()
                print(f"later: {sizes(conn)}", flush=True)
            conn.close()
            broker.close()


if __name__ == "__main__":
    main()
