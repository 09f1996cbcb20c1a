"""PostgreSQL with a synchronous standby: what was accepted survives the primary."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import psutil
import psycopg
import pytest
from harness import LIMIT, eventually, opened
from servers import Postgres

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.registry import grants_of
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner
from tidemill.errors import BrokerUnavailable


def pair(stack: contextlib.ExitStack) -> tuple[Postgres, Postgres]:
    """A primary with a store, and a standby that each commit waits for."""
    primary = stack.enter_context(contextlib.closing(Postgres()))
    opened(stack, f"{primary.url()}?migrate=1").close()
    standby = stack.enter_context(contextlib.closing(Postgres(primary=primary)))
    primary.run("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.run("SELECT pg_reload_conf()")
    state = "SELECT sync_state FROM pg_stat_replication"
    eventually(lambda: primary.run(state) == "sync", "the standby is synchronous")
    return primary, standby


@pytest.mark.parametrize("user", ["tidemill", "app"])
def test_a_put_waits_for_the_standby_and_survives_the_primary(
    stack: contextlib.ExitStack, user: str
) -> None:
    # law 1, also for a user with no more rights than are printed
    primary, standby = pair(stack)
    if user == "app":
        primary.run("CREATE ROLE app LOGIN")
        primary.run("".join(grants_of(primary.url(), "app") or []))
    both = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    url = f"postgresql://{user}@{both}/postgres?target_session_attrs=read-write&patience=30"
    broker = opened(stack, url)
    assert "synchronous_standby_names=*" in broker.info()["durability"]
    broker.attach(Owner(id="w", name="w"))  # it sleeps: its job is handed over by the put
    assert broker.exchange(Step("w", want=Want(1, ("handed",), sleep=True))).leases == []
    accepted: list[str] = []

    def put() -> None:
        for name, queue in (("a", "handed"), ("b", "plain"), ("c", "plain")):
            broker.put([Envelope(id=name, task="t", queue=queue)])
            accepted.append(name)

    # when the standby does not hear, nothing is accepted
    putting = threading.Thread(target=put)
    with frozen(standby):
        putting.start()
        putting.join(1.0)
        assert accepted == []
    putting.join(LIMIT)
    assert accepted == ["a", "b", "c"]
    # and when the primary is gone for good
    primary.kill()
    standby.run("SELECT pg_promote()")
    standby.run("ALTER SYSTEM RESET synchronous_standby_names")
    standby.run("SELECT pg_reload_conf()")
    # then all that was accepted is there, by the same url
    assert [record.envelope.id for record in map(broker.get, accepted)] == accepted
    broker.put([Envelope(id="d", task="t")])


@contextlib.contextmanager
def frozen(server: Postgres) -> Iterator[None]:
    """For the time of a block all its processes stand still."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def test_queues_that_a_fail_over_lost_are_made_again(stack: contextlib.ExitStack) -> None:
    # law 1: what the new primary accepts is in the queue that was named, and runs
    primary = stack.enter_context(contextlib.closing(Postgres()))
    opened(stack, f"{primary.url()}?migrate=1").close()
    standby = stack.enter_context(contextlib.closing(Postgres(primary=primary)))
    both = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    url = f"postgresql://tidemill@{both}/postgres?target_session_attrs=read-write&patience=30"
    producer, worker, other = opened(stack, url), opened(stack, url), opened(stack, url)
    # Given a standby that lags: it has not heard of a queue that a producer and a worker use.
    producer.put([Envelope(id="old", task="t", queue="old")])
    worker.attach(Owner(id="w", name="w"))
    standby.cut_off(primary)
    for broker in (producer, other):
        broker.put([Envelope(id=new_id(), task="t", queue="lost")])
    worker.exchange(Step("w", want=Want(2, ("lost",))))
    # When it takes over, and a stranger uses a queue that is new there.
    primary.kill()
    standby.run("SELECT pg_promote()")
    opened(stack, url).put([Envelope(id="strange", task="t", queue="stranger")])
    producer.put([Envelope(id="a", task="t", queue="lost")])
    with psycopg.connect(standby.url()) as mine:
        other.put([Envelope(id="b", task="t", queue="lost")], txn=mine)
    # Then the queue is made again, and the worker gets what was put there.
    taken: set[str] = set()

    def take() -> bool:
        with contextlib.suppress(BrokerUnavailable):
            reply = worker.exchange(Step("w", want=Want(2, ("lost",))))
            taken.update(lease.open().id for lease in reply.leases)
        return taken == {"a", "b"}

    eventually(take, "the two jobs", pause=0.1)
    counted = {row.name: row.accepted for row in producer.stats()}
    assert counted == {"old": 1, "stranger": 1, "lost": 2}
