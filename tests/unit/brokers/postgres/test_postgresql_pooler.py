"""PgBouncer in transaction mode: what works behind it, and what a direct URL adds."""

from __future__ import annotations

import logging
import threading
import time
import urllib.parse
from collections.abc import Iterator

import pytest
from harness import eventually
from postgres_desk import ids, job, take
from servers import PgBouncer, Postgres

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Owner, State, Verdict

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def pooler(server: Postgres) -> Iterator[PgBouncer]:
    pooler = PgBouncer(server)
    yield pooler
    pooler.close()


@pytest.fixture
def url(pooler: PgBouncer) -> str:
    return f"{pooler.url()}?schema=t{new_id()}&migrate=1"


def work_off(broker: Broker, owner: str, count: int, seconds: float = 20.0) -> list[str]:
    """Jobs as they come to one who sleeps in between."""
    done: list[str] = []
    until = time.monotonic() + seconds
    while len(done) < count and time.monotonic() < until:
        leases = take(broker, owner, 5)
        done += [lease.open().id for lease in leases]
        broker.exchange(Step(owner, verdicts=[Verdict(lease.token, 0) for lease in leases]))
        if not leases:
            broker.wait(owner, 20)
    return done


def test_all_but_hearing_works(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    broker, other = open_broker(url), open_broker(url)
    try:
        assert broker.info()["pooled"] is True
        broker.attach(Owner(id="o", name="w"))
        assert "give the server's own url as direct=" in caplog.text
        for n in range(30):  # more calls than a driver makes before it prepares them
            other.put([job(id=f"j{n}")])
        threading.Timer(0.3, lambda: other.put([job(id="late")])).start()
        assert len(work_off(broker, "o", 31)) == 31
        assert broker.wait_for(["late"], 20)[0].state is State.SUCCEEDED
        assert len(ids(other)) == 31
        broker.tick()
        assert len(broker.owners()) == 1
    finally:
        broker.close()
        other.close()


def test_with_a_direct_url_sleepers_hear(url: str, server: Postgres) -> None:
    # law 9
    direct = urllib.parse.quote(server.url(), safe="")
    # With such a lease who hears does not look without being told for longer than we wait here.
    broker, other = open_broker(f"{url}&direct={direct}&owner_lease=300"), open_broker(url)
    try:
        broker.attach(Owner(id="o", name="w"))
        assert broker.info()["pooled"] is True
        eventually(lambda: broker._session.longest_sleep() > 20, "it to hear")
        done: list[str] = []
        thread = threading.Thread(target=lambda: done.extend(work_off(broker, "o", 1)))
        thread.start()
        time.sleep(0.3)
        other.put([job(id="one")])
        thread.join(15)  # of the 20 it sleeps
        assert done == ["one"]
    finally:
        broker.close()
        other.close()
