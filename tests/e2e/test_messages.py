"""Messages, on every broker that needs no server: waits, room, blocks, and what goes wrong."""

from __future__ import annotations

import asyncio
import gc
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill import InvalidOption, QueueFull, State, Tidemill, TidemillError
from tidemill.core.envelope import Envelope
from tidemill.errors import CodecError, LeaseLost

pytestmark = pytest.mark.everyday


def bodies(mill: Tidemill, *queues: str) -> list[Any]:
    """Take everything, one by one, and acknowledge it."""
    found = []
    while (message := mill.get(queues or ["q"], 0)) is not None:
        found.append(message.body)
        assert message.ack()
    return found


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("strict", ["a1", "a2", "a3", "b1", "b2", "b3"]),
        ("fair", ["a1", "b1", "a2", "b2", "a3", "b3"]),
        ("merged", ["a1", "a2", "b1", "a3", "b2", "b3"]),
    ],
)
def test_the_order_of_several_queues_is_chosen(
    mill: Tidemill, order: Any, expected: list[str]
) -> None:
    for body in ("a1", "a2", "b1", "a3", "b2", "b3"):
        mill.queue(body[0]).put(body)
    taken = []
    while (message := mill.get(["a", "b"], 0, order=order)) is not None:
        taken.append(message.body)
        message.ack()
    assert taken == expected


def test_every_get_takes_an_order(mill: Tidemill) -> None:
    for body in ("a1", "a2", "b1", "b2"):
        mill.queue(body[0]).put(body)
    first = mill.get_many(["a", "b"], 2, 0, order="fair")
    rest = asyncio.run(mill.aget_many(["a", "b"], 2, 0, order="fair"))
    assert [sorted(m.body[0] for m in some) for some in (first, rest)] == [["a", "b"]] * 2
    assert asyncio.run(mill.aget(["a", "b"], 0, order="fair")) is None
    with pytest.raises(InvalidOption, match="order must be strict, fair or merged, not 'lifo'"):
        mill.get(["a"], 0, order="lifo")  # type: ignore[arg-type]


def later(seconds: float, call: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


class Looks:
    """Counts the exchanges of an app's consumers."""

    def __init__(self, mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = mill.broker.exchange

        def exchange(step: Any) -> Any:
            self.count += 1
            return real(step)

        monkeypatch.setattr(mill.broker, "exchange", exchange)


def test_a_get_that_waits_is_woken_by_the_put(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case Q2, Q18
    orders, put_at = mill.queue("q"), []
    mill.queue("q").get(timeout=0)
    looks = Looks(mill, monkeypatch)

    def put() -> None:
        orders.put("late")
        put_at.append(time.monotonic())

    timer = later(0.3, put)
    message = orders.get(timeout=20)
    took = time.monotonic()
    timer.join()
    assert message.body == "late"
    assert took - put_at[0] < 10  # 20 ms where nothing else runs; the benchmark says how long
    assert looks.count <= 4  # woken, not polled


def test_an_empty_queue_costs_nothing_to_wait_on(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case Q3, Q18
    mill.queue("q").get(timeout=0)
    looks = Looks(mill, monkeypatch)
    gc.collect()
    gc.disable()  # a collection among the objects of all tests takes longer than the wait
    try:
        began, cpu = time.monotonic(), time.thread_time()
        assert mill.queue("q").get(timeout=0.2) is None
        assert 0.2 <= time.monotonic() - began < 10
        assert looks.count <= 3
        assert time.thread_time() - cpu < 0.05
    finally:
        gc.enable()


def test_a_full_queue_refuses_or_waits_for_room(mill: Tidemill) -> None:
    # case Q19
    orders = mill.queue("q", max_size=5)
    for number in range(5):
        orders.put(number)
    with pytest.raises(QueueFull, match="max_size"):
        orders.put(5)
    with pytest.raises(queue.Full):
        orders.put(5, timeout=0.05)
    with pytest.raises(InvalidOption, match="before the commit"), mill.batch():
        orders.put(5, timeout=1)
    message = orders.get(5)
    timer = later(0.2, message.ack)
    orders.put(5, timeout=20)
    timer.join()
    assert bodies(mill) == [1, 2, 3, 4, 5]
    mill.queue("q", max_size=0).put_many(range(9))


def test_the_block_decides(mill: Tidemill) -> None:
    orders = mill.queue("q")
    # acknowledged at the end
    orders.put(1)
    with orders.get(5) as message:  # type: ignore[union-attr]
        assert message.body == 1
    assert orders.size() == 0
    # an exception brings it back, counted
    orders.put(2)
    with pytest.raises(KeyError), orders.get(5) as message:  # type: ignore[union-attr]
        raise KeyError("x")
    with orders.get(5) as message:  # type: ignore[union-attr]
        assert (message.body, message.attempt) == (2, 2)
        assert message.release(delay=1800)  # what the block itself says is not said again
    assert mill.queues()[0].scheduled == 1
    # a consumer that is stopped is not the message's fault
    orders.put(3)
    with pytest.raises(KeyboardInterrupt), orders.get(5):  # type: ignore[union-attr]
        raise KeyboardInterrupt
    with orders.get(5) as message:  # type: ignore[union-attr]
        assert (message.body, message.attempt) == (3, 1)


def test_the_block_says_when_the_lease_was_lost(mill: Tidemill) -> None:
    orders = mill.queue("q")
    orders.put(1, ttr=0.1)
    message = orders.get(5)
    assert message is not None
    again = orders.get(20)
    assert again is not None
    with pytest.raises(LeaseLost, match=r"ttr of 0.1 s.*Touch it"), message:
        pass
    with pytest.raises(ZeroDivisionError), message:  # the block's own error comes first
        raise ZeroDivisionError
    assert again.ack() or again.attempt == 2


def test_buried_is_kept_for_a_human_and_can_be_retried(mill: Tidemill) -> None:
    job = mill.queue("q").put({"bad": 1})
    message = mill.queue("q").get(5)
    assert message.bury("cannot be read")
    assert not message.bury()
    assert (job.state, job.error) == (State.FAILED, "cannot be read")
    [found] = mill.jobs(state="failed").page().records
    assert (found.envelope.id, found.envelope.text) == (job.id, "{'bad': 1}")
    assert mill.queue("q").size() == 0
    assert job.retry()
    assert bodies(mill) == [{"bad": 1}]


def test_the_block_buries_a_message_that_it_cannot_read(mill: Tidemill) -> None:
    mill.broker.put([Envelope(id="odd", queue="q", body=b"\xc1")])
    with pytest.raises(CodecError), mill.queue("q").get(5) as message:  # type: ignore[union-attr]
        _ = message.body
    assert mill.job("odd").state is State.FAILED


def test_unsigned_messages_are_not_handed_out(mill: Tidemill) -> None:
    # case T15
    mill.runtime.keys = [b"secret"]
    mill.queue("q").put("signed")
    forged = Envelope(id="forged", queue="q", body=b"\x01", signature=b"x" * 32)
    mill.broker.put([Envelope(id="bare", queue="q", body=b"\x01"), forged])
    assert bodies(mill) == ["signed"]
    for name in ("bare", "forged"):
        assert "bad signature" in mill.job(name).error


def test_endless_consumption(mill: Tidemill) -> None:
    tasks = mill.queue("q")
    timer = later(0.1, lambda: tasks.put_many([1, 2, None]))
    seen = []
    for message in tasks:
        with message:
            seen.append(message.body)
        if message.body is None:
            break
    timer.join()
    assert seen == [1, 2, None]
    assert tasks.size() == 0


def test_asyncio(mill: Tidemill) -> None:
    tasks = mill.queue("q")

    async def main() -> None:
        waiting = asyncio.create_task(tasks.aget(timeout=20))
        await asyncio.sleep(0.05)
        await tasks.aput(1, ttr=30)
        message = await waiting
        assert await message.atouch()
        assert await message.arelease()
        await tasks.aput_many([2, 3])
        assert await tasks.asize() == 3
        seen = []
        async for message in tasks:
            async with message:
                seen.append(message.body)
            if len(seen) == 3:
                break
        assert seen == [1, 2, 3]
        await tasks.aput(4)
        other = await mill.aget(["none", "q"], timeout=5)
        assert await other.abury("why")
        assert await tasks.aget(timeout=0) is None

    asyncio.run(main())


# -- deletion --------------------------------------------------------------------------------------


def names(mill: Tidemill) -> list[str]:
    return [row.name for row in mill.queues()]


def test_a_queue_with_jobs_is_deleted_only_with_force(mill: Tidemill) -> None:
    orders = mill.queue("orders")
    orders.put_many(["ready", "failed"])
    message = orders.get(timeout=10)
    message.bury("it cannot work")

    with pytest.raises(TidemillError, match="1 unfinished job; purge it first"):
        orders.delete()
    assert orders.purge(now=True) == 1
    with pytest.raises(TidemillError, match="keeps finished jobs"):
        orders.delete()
    assert names(mill) == ["orders"]

    assert orders.delete(force=True) == 1
    assert names(mill) == []
    assert list(mill.jobs()) == []


def test_the_command_line_deletes_a_queue(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"
    with Tidemill(url) as mill:
        mill.queue("orders").put("one")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidemill", "delete-queue", *words, "--url", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    refused = run("orders")
    assert refused.returncode == 1
    assert "queue 'orders' has 1 unfinished job" in refused.stderr

    done = run("orders", "--force", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"queue": "orders", "deleted": 1}
    with Tidemill(url) as mill:
        assert names(mill) == []
