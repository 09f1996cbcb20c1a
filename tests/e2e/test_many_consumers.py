"""Many threads of one process begin to consume at the same moment."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from once_storm import STORES
from servers import NETWORK, forget_served

from tidemill import Tidemill
from tidemill.core.clock import new_id

THREADS = 100


@pytest.mark.parametrize("store", ["memory", "http", *STORES])
def test_a_hundred_threads_begin_to_consume_at_once(store: str, tmp_path: Path) -> None:
    # given one message for each thread
    if store in STORES:
        url = STORES[store](tmp_path)
    else:
        url = "memory://" if store == "memory" else NETWORK["http"](f"many{new_id()}")
    start = threading.Barrier(THREADS)
    got: list[int] = []
    errors: list[BaseException] = []
    with Tidemill(url) as mill:
        queue = mill.queue("q")
        queue.put_many(range(THREADS))

        def consume() -> None:
            start.wait(60)
            try:
                message = queue.get(timeout=60)
                got.append(message.body)
                assert message.ack()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=consume) for _ in range(THREADS)]
        # when
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        # then
        assert errors == []
        assert sorted(got) == list(range(THREADS))
        assert queue.get(timeout=0) is None
    forget_served(tmp_path)
