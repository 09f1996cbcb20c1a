"""Calls in a transaction that holds the write lock of SQLite do not wait for their own thread."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from servers import django_on_sqlite

from tidemill import Tidemill
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import State
from tidemill.testing import run_all

PATIENCE = 60


def test_the_first_put_joins_a_transaction_that_holds_the_write_lock(tmp_path: Path) -> None:
    # given a new store, and a transaction of this thread that has written
    url = f"{django_on_sqlite(str(tmp_path / 'store'))}?patience={PATIENCE}"
    alias = url.removeprefix("django://").partition("?")[0]
    from django.db import connections, transaction

    job = Envelope(id=new_id(), task="t")
    with transaction.atomic(using=alias):
        connections[alias].cursor().execute("CREATE TABLE shop_order (id INTEGER)")
        # when the broker is opened and puts
        begun = time.monotonic()
        broker = open_broker(url)
        broker.put([job])
        # then it does not wait for its own thread
        assert time.monotonic() - begun < PATIENCE / 2
    # and the job is stored, in a store with the name that others see
    with contextlib.closing(broker), contextlib.closing(open_broker(url)) as other:
        assert other.get(job.id) is not None
        assert broker.get(job.id) is not None
        assert broker.identity == other.identity != "django "
    connections[alias].close()


def test_a_look_at_a_job_that_has_expired_waits_for_no_transaction_of_its_own(
    tmp_path: Path,
) -> None:
    # case M15
    # given a job that has expired, which no worker has noticed
    url = f"{django_on_sqlite(str(tmp_path / 'store'))}?patience={PATIENCE}"
    alias = url.removeprefix("django://").partition("?")[0]
    from django.db import connections, transaction

    mill = Tidemill(url)
    job = mill.queue("q").put("a", expires=0.01)
    time.sleep(0.05)
    with transaction.atomic(using=alias):
        connections[alias].cursor().execute("CREATE TABLE shop_order (id INTEGER)")
        # when a transaction that holds the lock looks at the job
        begun = time.monotonic()
        assert job.state in (State.READY, State.EXPIRED)
        assert [each.id for each in mill.jobs()] == [job.id]
        # then it does not wait for its own thread
        assert time.monotonic() - begun < PATIENCE / 2
    assert job.state is State.EXPIRED
    mill.close()
    connections[alias].close()


def test_a_store_whose_tables_were_flushed_begins_anew(tmp_path: Path) -> None:
    # case M15: Django's TransactionTestCase empties all tables after each test
    url = django_on_sqlite(str(tmp_path / "store"))
    alias = url.removeprefix("django://").partition("?")[0]
    from django.core.management import call_command
    from django.db import connections, transaction

    with Tidemill(url) as mill:

        @mill.task
        def double(n: int) -> int:
            return 2 * n

        double.enqueue(1)
        name = mill.broker.identity
        for number in (2, 3):
            call_command("flush", interactive=False, database=alias, verbosity=0)
            with transaction.atomic(using=alias):
                inside = double.enqueue(number)
            outside = double.enqueue(number)
            run_all(mill)
            assert [job.result(timeout=0) for job in (inside, outside)] == [2 * number] * 2
            assert len(list(mill.jobs())) == 2
        assert mill.broker.identity == name
    connections[alias].close()
