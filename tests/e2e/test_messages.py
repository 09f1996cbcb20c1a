"""Messages, on every broker that needs no server: put, get, acknowledge, and what goes wrong."""

from __future__ import annotations

import datetime as dt
import decimal
import gc
import itertools
import math
import queue
import random
import threading
import time
import uuid
import zoneinfo
from typing import Any

import pytest
from message_desk import bodies, later

from tidemill import DuplicateJob, InvalidOption, Key, QueueFull, State, Tidemill
from tidemill.errors import CodecError

pytestmark = pytest.mark.everyday


class Looks:
    """Counts the exchanges of an app's consumers."""

    def __init__(self, mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = mill.broker.exchange

        def exchange(step: Any) -> Any:
            self.count += 1
            return real(step)

        monkeypatch.setattr(mill.broker, "exchange", exchange)


def test_first_in_first_out(mill: Tidemill) -> None:
    # case Q1
    orders = mill.queue("q")
    for item in (2, 3, 1):
        orders.put(item)
    assert bodies(mill) == [2, 3, 1]
    assert orders.get(timeout=0) is None
    assert orders.size() == 0


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
    assert message is not None
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


def test_names_that_begin_alike_are_different_queues(mill: Tidemill) -> None:
    # case Q5
    names = ["q", "queue2", "a", "a.b", "a.b.c", "aa", "ä"]
    for turn in range(3):
        for name in names:
            mill.queue(name).put([name, turn])
    for name in names:
        assert bodies(mill, name) == [[name, turn] for turn in range(3)]


def test_put_many_keeps_order_and_types(mill: Tidemill) -> None:
    # case Q6
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    items = [
        *(5, "text", b"bytes", None, True, False, 1.5, math.inf, [], {}, (), set(), ""),
        *((1, (2, [3])), {1, "a"}, frozenset({b"x"}), {"a": {"b": (1,)}}, {1: 2, (1, 2): 3}),
        *(decimal.Decimal("1.10"), uuid.uuid4(), 2**64, -(2**200), "\x00ü€", "a" * 10_000),
        dt.datetime(2026, 3, 29, 2, 30, tzinfo=zone),
        dt.datetime(2026, 1, 1, 12, 0, 0, 1),
        *(dt.date(2026, 2, 28), dt.time(23, 59), dt.timedelta(days=-1, microseconds=1)),
    ]
    jobs = mill.queue("q").put_many(items)
    assert [job.record.seq for job in jobs] == sorted(job.record.seq for job in jobs)
    found = bodies(mill)
    assert found == items
    assert [type(item) for item in found] == [type(item) for item in items]
    assert found[items.index(items[-5])].tzinfo in (zone, None)
    with pytest.raises(InvalidOption, match="id names one message"):
        mill.queue("q").put_many([1, 2], id="x")
    assert mill.queue("q").put_many([]) == []
    with pytest.raises(CodecError, match="object"):
        mill.queue("q").put_many([1, object()])
    assert mill.queue("q").size() == 0  # all or none


def test_an_id_is_free_after_the_ack(mill: Tidemill) -> None:
    # case Q13
    orders = mill.queue("orders")
    assert orders.put({"order": 17}, id="17", delay=0, ttr=100, priority=5).id == "17"
    with pytest.raises(DuplicateJob):
        mill.queue("others").put(1, id="17")
    message = orders.get(5)
    assert message is not None
    assert (message.id, message.body, message.attempt) == ("17", {"order": 17}, 1)
    with pytest.raises(DuplicateJob):
        orders.put(2, id="17")
    assert message.ack()
    assert not message.ack()
    assert orders.put(3, id="17").state is State.READY


@pytest.mark.parametrize("bad", ["", "x" * 201, "a\nb", "\x00", 5, None, "\ud800"])
def test_bad_names_are_refused(mill: Tidemill, bad: Any) -> None:
    # case Q13
    with pytest.raises(InvalidOption, match=r"^queue "):
        mill.queue(bad)
    with pytest.raises(InvalidOption, match=r"^queue "):
        mill.get([bad], 0)
    if bad is not None:
        for name in ("id", "key"):
            with pytest.raises(InvalidOption, match=f"^{name} "):
                mill.queue("q").put(1, **{name: bad})


@pytest.mark.parametrize("bad", ["5", -1, math.nan, math.inf, 1e12, True, [3]])
def test_bad_numbers_are_refused_by_name(mill: Tidemill, bad: Any) -> None:
    # case Q17
    orders = mill.queue("q")
    for name in ("delay", "ttr", "expires", "timeout", "priority"):
        if (name, bad) != ("priority", -1):
            with pytest.raises(InvalidOption, match=f"^{name} "):
                orders.put(1, **{name: bad})
    with pytest.raises(InvalidOption, match=r"^timeout "):
        orders.get(bad)
    orders.put(1)
    message = orders.get(5)
    assert message is not None
    for name, method in (("delay", message.release), ("ttr", message.touch)):
        with pytest.raises(InvalidOption, match=f"^{name} "):
            method(bad)
    assert message.ack()
    with pytest.raises(InvalidOption, match=r"^max_size "):
        mill.queue("q", max_size=bad)


def test_a_delay_is_never_early(mill: Tidemill) -> None:
    # case Q14
    orders, began = mill.queue("q"), time.monotonic()
    orders.put("relative", delay=0.25)
    orders.put("absolute", at=time.time() + 0.35)
    for body, due in (("relative", 0.25), ("absolute", 0.35)):
        message = orders.get(timeout=20)
        assert message is not None
        waited = time.monotonic() - began
        assert message.body == body
        assert due - 0.002 <= waited < due + 10


def test_a_delay_is_never_early_for_who_keeps_asking_either(mill: Tidemill) -> None:
    # case Q14
    orders, began = mill.queue("q"), time.monotonic()
    orders.put("x", delay=0.2)
    while (message := orders.get(timeout=0)) is None:
        threading.Event().wait(0.001)
    assert time.monotonic() - began >= 0.2
    assert message.ack()


def test_a_thousand_due_at_once_come_by_priority_then_age(mill: Tidemill) -> None:
    # case Q14, S2
    at = time.time() + 0.3
    rng = random.Random(7)
    given = [(rng.choice([-10, 0, 0.5, 10]), number) for number in range(1000)]
    for priority, same in itertools.groupby(given, lambda item: item[0]):
        mill.queue("q").put_many([(priority, n) for _, n in same], at=at, priority=priority)
    first = mill.queue("q").get(timeout=20)
    assert first is not None
    assert first.ack()
    found = [first.body, *bodies(mill)]
    assert found == sorted(given, key=lambda item: (-item[0], item[1]))


def test_several_queues_in_order(mill: Tidemill) -> None:
    # case Q15
    for name in ("C", "B", "A"):
        mill.queue(name).put_many([f"{name}1", f"{name}2"], priority=5 if name == "C" else 0)
    assert bodies(mill, "A", "B", "C") == ["A1", "A2", "B1", "B2", "C1", "C2"]
    for bad in ([], (), "A", None):
        with pytest.raises(InvalidOption, match="at least one queue"):
            mill.get(bad, 0)  # type: ignore[arg-type]


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
    assert message is not None
    timer = later(0.2, message.ack)
    orders.put(5, timeout=20)
    timer.join()
    assert bodies(mill) == [1, 2, 3, 4, 5]
    mill.queue("q", max_size=0).put_many(range(9))


def test_keys_merge(mill: Tidemill) -> None:
    # case S1
    tasks = mill.queue("q")
    first = tasks.put("a", key=Key("a", on_conflict="merge"), delay=1800)
    merged = tasks.put("b", key=Key("a", on_conflict="merge"), priority=7)
    assert (merged, merged.placed, tasks.size()) == (first, "merged", 1)
    message = tasks.get(5)  # the earlier time and the higher priority won; the data stay
    assert message is not None
    assert message.body == "a"
    assert tasks.put("c", key=Key("a", on_conflict="merge")).placed == "kept"
    assert tasks.size() == 1
    newest = [tasks.put(body, key=Key("a", on_conflict="replace")) for body in ("d", "e")]
    assert tasks.size() == 2
    with pytest.raises(DuplicateJob):
        tasks.put("f", key=Key("a", on_conflict="reject"))
    assert tasks.get(timeout=0) is None
    assert message.ack()
    assert bodies(mill) == ["e"]
    assert newest[0] != newest[1]


def test_a_due_message_takes_its_place_by_priority(mill: Tidemill) -> None:
    # case S2
    tasks = mill.queue("q")
    tasks.put_many(["one", "two"])
    first = tasks.get(5)
    tasks.put("high and late", priority=5, delay=0.2)
    threading.Event().wait(0.25)
    assert first is not None
    assert [first.body, *bodies(mill)] == ["one", "high and late", "two"]


def test_size_counts_what_is_not_done(mill: Tidemill) -> None:
    # case S3, S4
    tasks = mill.queue("q")
    jobs = [tasks.put("ready"), tasks.put("scheduled", delay=1800), tasks.put("last")]
    running = tasks.get(5)
    assert running is not None
    assert tasks.size() == 3
    assert not mill.job("unknown").delete()
    assert [job.delete() for job in jobs] == [True, True, True]
    assert running.ack() is False
    assert tasks.size() == 0


def test_pause_resume_purge(mill: Tidemill) -> None:
    tasks = mill.queue("q")
    tasks.put_many([1, 2, 3])
    tasks.pause()
    assert tasks.get(timeout=0) is None
    timer = later(0.1, tasks.resume)
    message = tasks.get(20)
    timer.join()
    assert message is not None
    tasks.put(4, delay=1800)
    assert tasks.purge() == 3
    assert tasks.size() == 1
    assert message.ack()
