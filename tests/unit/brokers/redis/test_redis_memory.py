"""A Redis server that is out of memory: work goes on, and does not take more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from servers import Redis

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.redis import out_of_memory
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.core.envelope import RESULT_NOT_KEPT, Envelope
from tidemill.core.job import Note, Outcome, State, Verdict
from tidemill.errors import StoreFull

MB = 1 << 20
LIMIT = 12 * MB


@pytest.fixture
def server() -> Iterator[Redis]:
    with contextlib.closing(Redis("--maxmemory", str(LIMIT))) as server:
        yield server


@pytest.fixture
def url(server: Redis) -> str:
    return f"{server.url}?patience=0"


def fill(broker: RedisBroker, size: int = 1000, prefix: str = "j") -> int:
    """Put jobs until the server refuses them; how many that were."""
    count = 0
    with contextlib.suppress(StoreFull):
        while True:
            ids = range(count, count + 50)
            broker.put([Envelope(id=f"{prefix}{n}", task="t", body=b"x" * size) for n in ids])
            count += 50
    return count


def take(broker: RedisBroker, count: int) -> list[int]:
    return [lease.token for lease in broker.exchange(Step("w", want=Want(count))).leases]


def settle(broker: RedisBroker, tokens: list[int], result: bytes, **fields: object) -> Reply:
    verdicts = [Verdict(t, Outcome.SUCCESS, result, **fields) for t in tokens]  # type: ignore[arg-type]
    return broker.exchange(Step("w", verdicts))


def used(broker: RedisBroker) -> int:
    return int(broker.info()["memory_bytes"])


def test_a_process_that_opens_a_store_whose_server_evicts_keys_warns_once(
    server: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    # case M13
    def warnings() -> list[str]:
        with Tidemill(server.url) as mill:
            mill.task(name="t")(print)
            mill.enqueue("t")
            mill.enqueue("t")
        return [record.message for record in caplog.records if "throw jobs" in record.message]

    assert warnings() == []
    server.run("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    (warning,) = warnings()
    assert "maxmemory-policy is allkeys-lru; set maxmemory-policy noeviction" in warning


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("size", [400, 10_000])
def test_draining_a_full_server_stays_near_its_limit(
    broker: RedisBroker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    # laws 15, 16
    monkeypatch.setattr(out_of_memory, "_SAID_FOR", 3600.0)  # a busy machine drains for minutes
    # given a server that is filled with jobs
    jobs = fill(broker)
    most = 0
    # when all are done, and return far more than the server has room for
    for _ in range(0, jobs, 100):
        assert all(settle(broker, take(broker, 100), b"r" * size).settled)
        most = max(most, used(broker))
    # then it has used little more than it may
    assert most < LIMIT * 1.2
    # and every outcome is kept; results are, or it is said that they are not
    assert sum(row.succeeded for row in broker.stats()) == jobs
    last = broker.get(f"j{jobs - 1}")
    assert last.state is State.SUCCEEDED
    assert last.raw_result == RESULT_NOT_KEPT
    assert len([r for r in caplog.records if "results are not kept" in r.message]) == 1


@pytest.mark.usefixtures("worker")
def test_a_full_server_keeps_neither_tracebacks_nor_lines_of_logs(broker: RedisBroker) -> None:
    # laws 15, 16
    broker.put([Envelope(id="a", task="t"), Envelope(id="b", task="t")])
    first, second = take(broker, 2)
    fill(broker)
    # when a job fails that says much
    verdict = Verdict(first, Outcome.FAIL, error="w" + "é" * 1000, traceback="t" * 60_000)
    broker.exchange(Step("w", [verdict], notes=[Note(second, 1, 2, "l" * 60_000, 1.0)]))
    # then the beginning of the reason is kept, and the progress of the other
    a, b = broker.get_many(["a", "b"])
    assert (a.state, a.attempts[0].traceback) == (State.FAILED, "")
    assert a.error == a.attempts[0].error == "w" + "é" * 249
    assert (b.progress, b.log) == ((1, 2), [])


def test_a_purge_of_a_full_server_deletes_what_it_cannot_keep(server: Redis) -> None:
    # law 16
    with Tidemill(f"{server.url}?patience=0") as mill:
        orders = mill.queue("q")
        with contextlib.suppress(StoreFull):
            while True:
                orders.put_many([b"x" * 1000] * 50)
        jobs = orders.size()
        assert jobs > 1000
        assert orders.purge() == jobs
        assert (orders.size(), orders.purges(), list(mill.jobs())) == (0, [], [])
        # when there is room again, a purge keeps all
        orders.put_many([1, 2, 3])
        assert orders.purge() == 3
        assert orders.restore().jobs == 3
