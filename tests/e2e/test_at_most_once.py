"""Messages with ttr=0: delivered and remaining messages add up to the messages that were put."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from once_storm import STORES, Poller, all_of, in_threads, producer
from servers import NETWORK, forget_served
from servers.http import JobServer

from tidemill import Tidemill
from tidemill.core.clock import new_id

MANY = 300


@pytest.mark.everyday("1-lmdb", "1-redis", "1-postgresql")
@pytest.mark.parametrize("store", ["memory", "http", *STORES])
@pytest.mark.parametrize("n", [1, 5])
def test_a_cancelled_aget_takes_nothing(store: str, n: int, tmp_path: Path) -> None:
    if store in STORES:
        url = STORES[store](tmp_path)
    else:
        url = "memory://" if store == "memory" else NETWORK["http"](f"once{new_id()}")
    # law 2
    got: list[int] = []

    async def consume(mill: Tidemill, put: threading.Thread) -> None:
        random_ = random.Random(2)
        while put.is_alive():
            task = asyncio.ensure_future(mill.queue("q").aget_many(n))
            await asyncio.sleep(random_.random() * 0.004)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                got.extend(message.body for message in await task)

    with Tidemill(url) as mill:
        # when calls are cancelled at random moments while messages come
        with producer(mill, range(MANY)) as put:
            asyncio.run(consume(mill, put))
        # then each message was delivered, or is there
        assert all_of(mill, got, MANY) == list(range(MANY))
    forget_served(tmp_path)


def storm(server: JobServer, work: Callable[[Poller, random.Random], object]) -> list[int]:
    """Count messages of three pollers and of the queue in the end, while others are put."""
    pollers = [Poller(server.port) for _ in range(3)]
    with Tidemill(server.where) as mill, producer(mill, range(MANY)) as put:

        def go(poller: Poller, random_: random.Random) -> None:
            while put.is_alive() and work(poller, random_):
                pass

        works = [lambda p=p, n=n: go(p, random.Random(n)) for n, p in enumerate(pollers)]
        threads = in_threads(works)  # type: ignore[arg-type]  # the defaults are their own
        for thread in threads:
            thread.join(120)
    with Tidemill(server.where) as mill:
        return all_of(mill, [body for poller in pollers for body in poller.got], MANY)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("leaves", [False, True], ids=["ends", "leaves"])
def test_a_poll_that_ends_or_whose_client_leaves_loses_nothing(
    store: str, leaves: bool, tmp_path: Path
) -> None:
    server = JobServer(where=STORES[store](tmp_path))
    try:
        if leaves:
            found = storm(server, lambda p, r: p.poll(r.choice([0, 30]), r.random() * 0.01))
        else:
            found = storm(server, lambda p, r: p.poll(r.choice([0, r.random() * 0.03])))
        assert found == list(range(MANY))
    finally:
        server.close()


@pytest.mark.parametrize("store", STORES)
def test_a_server_that_is_told_to_end_loses_nothing(store: str, tmp_path: Path) -> None:
    server = JobServer(where=STORES[store](tmp_path))
    ended = threading.Timer(0.4, lambda: server.end())
    try:
        ended.start()
        assert storm(server, lambda p, _: p.poll(30)) == list(range(MANY))
    finally:
        ended.join()
        server.close()


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
