"""The first put to a new store in SQLite, inside a transaction that has written already."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from servers import django_on_sqlite

from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Envelope

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
