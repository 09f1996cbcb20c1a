"""Signal handlers that raise at every bytecode of a get, or enqueue during a wait, on LMDB."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bytecodes import SIGNAL, Alarm, At, raise_alarm
from lmdb_desk import Gate, ids, in_threads, job, join

import tidemill
from tidemill import Tidemill
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.registry import open_broker

pytestmark = pytest.mark.everyday

ROOT = Path(tidemill.__file__).parent
ROOMS = {
    str(ROOT / f"{name}.py")
    for name in (
        *("core/signals", "core/commit_delay", "client/messages", "brokers/shared/waits"),
        *("brokers/lmdb/engine/group_commit", "brokers/lmdb/engine/write_lock"),
        *("brokers/lmdb/engine/transactions", "brokers/lmdb/engine/store"),
        *("brokers/lmdb/owners", "brokers/lmdb/look/waits"),
    )
}
assert all(map(os.path.exists, ROOMS)), "a file has moved"


@pytest.fixture
def handler() -> Iterator[list[Callable[[], None]]]:
    """The handler of the signal calls this function; tests replace it."""
    does: list[Callable[[], None]] = [raise_alarm]
    before = signal.signal(SIGNAL, lambda *_: does[0]())
    yield does
    signal.signal(SIGNAL, before)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store?durability=relaxed&patience=10"


def at_every_step(call: Callable[[], object], check: Callable[[At], None]) -> int:
    """Interrupt the call at its first bytecode, its second, and so on; how many it has."""
    step = 0
    while True:
        step += 1
        at = At(step, ROOMS.__contains__)
        try:
            with at:
                call()
        except Alarm:
            pass
        if at.left > 0:
            return step - 1
        check(at)


def others_can_write(broker: LmdbBroker) -> Callable[[At], None]:
    def check(at: At) -> None:
        threads, answers = in_threads([lambda: broker.put([job()])])
        join(threads)
        assert isinstance(answers[0], list), f"nobody can write after {at.where}: {answers[0]}"
        assert broker.put([job()]), f"the thread itself cannot write after {at.where}"

    return check


def test_a_handler_that_raises_at_any_bytecode_of_a_get_blocks_nobody(
    url: str, handler: list[Callable[[], None]]
) -> None:
    with Tidemill(url) as mill:
        queue = mill.queue("q")
        queue.put(b"first")
        broker = mill.broker

        def check(at: At) -> None:
            others_can_write(broker)(at)
            queue.put(b"next")
            assert queue.get(timeout=10) is not None, f"nobody can get after {at.where}"

        assert at_every_step(lambda: queue.get(timeout=0), check) > 200


def test_a_handler_may_enqueue_while_its_thread_waits_for_a_commit(
    url: str, handler: list[Callable[[], None]]
) -> None:
    # given a leader in another thread that goes on once two requests wait for it
    broker = open_broker(url)
    gate, called = Gate(broker._store), threading.Event()
    main = threading.main_thread().ident or 0

    def enqueue() -> None:
        if not called.is_set():
            called.set()
            broker.put([job(id="by the handler")])

    def press() -> None:
        while not broker._store.commits.pending:
            pass
        while not called.wait(0.2):
            signal.pthread_kill(main, SIGNAL)
        gate.release_when(2)

    handler[0] = enqueue
    presser = threading.Thread(target=press)
    presser.start()
    # when
    broker.put([job(id="by the thread")])
    presser.join(30)
    # then
    assert ids(broker) == {"by the thread", "by the handler"}
    broker.close()
