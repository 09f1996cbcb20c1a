"""Messages once taken, on every broker that needs no server: leases, blocks, many consumers."""

from __future__ import annotations

import asyncio
import threading

import pytest
from message_desk import bodies, later

from tidemill import Filter, JobNotFound, State, Tidemill
from tidemill.core.envelope import Envelope
from tidemill.errors import CodecError, LeaseLost


def test_at_most_once(mill: Tidemill) -> None:
    # case Q16
    job = mill.queue("q").put("once", ttr=0)
    message = mill.queue("q").get(5)
    assert message is not None
    with pytest.raises(JobNotFound):
        job.refresh()
    with message:
        assert message.body == "once"
    assert not message.ack()
    assert mill.queue("q").size() == 0


def test_a_message_not_acknowledged_in_time_comes_back(mill: Tidemill) -> None:
    # case Q16, S3
    orders = mill.queue("q")
    orders.put("again", id="a", ttr=600)
    first = orders.get(5)
    assert first is not None
    assert orders.size() == 1
    assert first.touch(0.2)
    second = orders.get(timeout=20)
    assert second is not None
    assert (second.id, second.attempt, second.body) == ("a", 2, "again")
    assert second.touch(60)
    for late in (first.ack, first.release, first.touch, first.bury):
        assert late() is False  # and the second holder's is untouched
    assert orders.get(timeout=0) is None
    assert second.ack()
    assert second.release() is False
    assert bodies(mill) == []


def test_touch_gives_more_time(mill: Tidemill) -> None:
    orders = mill.queue("q")
    orders.put(1, ttr=15)  # time enough to touch the message in
    message = orders.get(5)
    assert message is not None
    assert message.ttr == 15
    assert message.touch(60)
    assert message.ttr == 60
    assert orders.get(timeout=15.5) is None
    assert message.ack()


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


def test_retries_bound_how_often_a_block_fails(mill: Tidemill) -> None:
    job = mill.queue("q").put(1, retries=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"), mill.queue("q").get(20):  # type: ignore[union-attr]
            raise ValueError("bad")
    assert job.state is State.FAILED
    assert job.error == "ValueError: bad"


def test_buried_is_kept_for_a_human_and_can_be_retried(mill: Tidemill) -> None:
    job = mill.queue("q").put({"bad": 1})
    message = mill.queue("q").get(5)
    assert message is not None
    assert message.bury("cannot be read")
    assert not message.bury()
    assert (job.state, job.error) == (State.FAILED, "cannot be read")
    [found] = mill.jobs(Filter(states=frozenset({State.FAILED}))).page().records
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
        assert message is not None
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
        assert other is not None
        assert await other.abury("why")
        assert await tasks.aget(timeout=0) is None

    asyncio.run(main())


def test_a_cancelled_get_takes_nothing(mill: Tidemill) -> None:
    tasks = mill.queue("q")

    async def main() -> None:
        for _ in range(20):
            waiting = asyncio.create_task(tasks.aget())
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await tasks.aput("mine")
            message = await tasks.aget(timeout=20)
            assert message is not None
            assert message.attempt == 1
            assert await message.aack()

    asyncio.run(main())


def test_many_threads_get_each_message_once(mill: Tidemill) -> None:
    # case Q8, in one process
    tasks, found = mill.queue("q"), []

    def take() -> None:
        while (message := tasks.get(timeout=60)) is not None:
            with message:
                if message.body is None:
                    return
                found.append(message.body)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for start in range(0, 400, 40):
        tasks.put_many(range(start, start + 40))
    tasks.put_many([None] * len(threads))
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(400))
