"""How long the longest script on Redis keeps all others waiting, in a large store.

    python benchmarks/redis_scripts.py redis://127.0.0.1:6379/0 [JOBS]

Use a server that nothing else uses: its slow log is set to take what lasts 0.5 ms, the jobs stay.
Fills a store with JOBS jobs (1,000,000 unless told): scheduled, ready and overdue ones, some under
a limit with 50,000 keys, some in 10,000 queues. Then does what could be linear in all that. Prints
for each how often a script ran, and the three longest in milliseconds, by the server's slow log;
and, when the server runs on this machine, the most processor time that one call took it, which
other work does not disturb.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import redis

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.redis.connections import ServerConnection
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock, new_id
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings
from tidemill.core.job import Outcome, Owner, State, Verdict

PIECE = 200
LATER = 600.0
KEYS = 50_000
QUEUES = 10_000
OVERDUE = 100_000
BODY = b"x" * 100


def main(url: str, jobs: int = 1_000_000) -> None:
    """Fill, do, print."""
    server = redis.Redis.from_url(url)
    server.config_set("slowlog-log-slower-than", 500)
    server.config_set("slowlog-max-len", 100_000)
    join = "&" if "?" in url else "?"
    broker = open_broker(f"{url}{join}prefix=bench{new_id()}&patience=60")
    assert isinstance(broker, RedisBroker)
    broker.attach(Owner(id="w", name="w"))
    begun = time.monotonic()
    fill(broker, jobs)
    print(f"{jobs} jobs in {time.monotonic() - begun:.0f} s")
    print(f"{'':<44} scripts      cpu  longest, ms")
    costs = processor_times(server)
    for name, call in acts(broker):
        server.slowlog_reset()
        costs.clear()
        before = scripts_run(server)
        call()
        scripts = scripts_run(server) - before
        spent = [one["duration"] for one in server.slowlog_get(100_000) if is_ours(one["command"])]
        longest = "".join(f"{one / 1000:8.1f}" for one in sorted(spent)[:-4:-1])
        most = f"{max(costs, default=0.0):8.1f}"
        print(f"{name:<44} {scripts:7} {most} {longest}", flush=True)
    broker.close()


def processor_times(server: redis.Redis) -> list[float]:
    """Milliseconds of a processor that the server's main thread spends on each call from now on."""
    pid, costs, run = server.info("server")["process_id"], list[float](), ServerConnection.run
    clock = Path(f"/proc/{pid}/task/{pid}/schedstat")
    if not clock.exists():
        return costs

    def timed(line: ServerConnection, verb: str, key: bytes, args: Sequence[bytes]) -> object:
        before = int(clock.read_text().split()[0])
        try:
            return run(line, verb, key, args)
        finally:
            costs.append((int(clock.read_text().split()[0]) - before) / 1e6)

    ServerConnection.run = timed  # type: ignore[method-assign]
    return costs


def scripts_run(server: redis.Redis) -> int:
    """How many scripts the server has run."""
    return int(server.info("commandstats").get("cmdstat_fcall", {}).get("calls", 0))


def is_ours(command: bytes) -> bool:
    """The slow log shows what a call was made with."""
    return command.startswith((b"FCALL tidemill_", b"fcall tidemill_"))


def put(broker: RedisBroker, prefix: str, count: int, **fields: object) -> None:
    """Jobs that are alike."""
    for start in range(0, count, PIECE):
        names = [f"{prefix}{n}" for n in range(start, min(count, start + PIECE))]
        broker.put([Envelope(id=name, task="t", body=BODY, **fields) for name in names])  # type: ignore[arg-type]


def put_keyed(broker: RedisBroker, prefix: str, count: int, terms: LimitSettings) -> None:
    """Jobs of as many keys of one limit."""
    for start in range(0, count, PIECE):
        ids = range(start, min(count, start + PIECE))
        claims = [(f"{prefix}{n}", JobLimit("api", f"k{n}", 1.0, terms)) for n in ids]
        broker.put(
            [Envelope(id=name, task="t", queue="keyed", limit=claim) for name, claim in claims]
        )


def drain(broker: RedisBroker, queue: str, count: int) -> None:
    """Run that many jobs of a queue."""
    verdicts: list[Verdict] = []
    while count > 0:
        want = Want(min(PIECE, count), queues=(queue,))
        leases = broker.exchange(Step("w", verdicts, want)).leases
        verdicts = [Verdict(lease.token, Outcome.SUCCESS, b"r" * 20) for lease in leases]
        count -= len(leases)
    broker.exchange(Step("w", verdicts))


def fill(broker: RedisBroker, jobs: int) -> None:
    """All kinds of jobs; together as many as asked for."""
    keys, queues, overdue = (min(n, jobs // 10) for n in (KEYS, QUEUES, OVERDUE))
    put(broker, "done", 4 * PIECE, queue="done")
    drain(broker, "done", 4 * PIECE)
    put_keyed(broker, "keyed", keys, LimitSettings(concurrency=1))
    names = [f"q{n}" for n in range(queues)]
    for start in range(0, queues, PIECE):
        some = names[start : start + PIECE]
        broker.put([Envelope(id=f"in-{name}", task="t", queue=name) for name in some])
    put(broker, "overdue", overdue, queue="overdue", delay=LATER)
    rest = jobs - keys - queues - overdue - 4 * PIECE
    put(broker, "ready", rest // 3, queue="ready")
    put(broker, "mine", 1000, queue="mine")
    put(broker, "mine-later", 1000, queue="mine", delay=2 * LATER)
    put(broker, "later", rest - rest // 3 - 2000, queue="later", delay=2 * LATER)


def acts(broker: RedisBroker) -> list[tuple[str, Callable[[], object]]]:
    """What is done, and how."""

    def come_due() -> None:
        clock.server_ahead = lambda: LATER * 1.1
        broker.exchange(Step("w", want=Want(10, queues=("overdue",))))
        broker.tick()

    def prune() -> None:
        clock.server_ahead = lambda: 7200.0
        broker.tick()

    def change() -> None:
        broker.set_limit("api", LimitSettings(rate=(1, 1.0)))

    ids = [f"ready{n}" for n in range(5000)]
    return [
        ("purge of a queue of 2,000", lambda: delete_waiting(broker, "mine")),
        ("a lease of 100 among the queues", lambda: broker.exchange(Step("w", want=Want(100)))),
        ("queues are listed", broker.stats),
        ("the first scheduled job of an empty queue", lambda: broker.head("x", State.SCHEDULED, 1)),
        ("limits are listed", broker.limits),
        (
            "a put changes a limit of 50,000 keys",
            lambda: put_keyed(broker, "new", 1, LimitSettings(concurrency=2)),
        ),
        ("a limit of 50,000 keys changes", change),
        ("100,000 overdue jobs come due", come_due),
        ("5,000 jobs are cancelled", lambda: broker.cancel(ids)),
        ("purge of 50,000 jobs of a limit", lambda: delete_waiting(broker, "keyed")),
        ("purge of what came due", lambda: delete_waiting(broker, "overdue")),
        ("all that is finished is pruned", prune),
    ]


if __name__ == "__main__":
    main(sys.argv[1], *(int(arg) for arg in sys.argv[2:]))
