"""Publishing: each bound queue gets a copy, all in one commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill import InvalidOption, Tidemill, TidemillError
from tidemill.brokers.generic.topics import matches
from tidemill.errors import FeatureMissing, Unroutable

MillMaker = Callable[..., Tidemill]


def bodies(mill: Tidemill, queue: str) -> list[Any]:
    return [message.body for message in mill.queue(queue).get_many(100, timeout=0)]


def test_each_bound_queue_gets_a_copy(mill: Tidemill) -> None:
    mill.queue("mail").bind("orders.*")
    mill.queue("audit").bind("#")
    mill.queue("eu").bind("orders.eu.#")

    jobs = mill.publish("orders.new", {"order": 17})

    assert [job.placed for job in jobs] == ["created", "created"]
    (mail,) = mill.queue("mail").get_many(9, timeout=0)
    (audit,) = mill.queue("audit").get_many(9, timeout=0)
    assert {mail.id, audit.id} == {job.id for job in jobs}
    assert mail.body == audit.body == {"order": 17}
    assert mail.headers == {"topic": "orders.new"}
    assert bodies(mill, "eu") == []


def test_a_mandatory_publish_that_reaches_nobody_is_refused(mill: Tidemill) -> None:
    with pytest.raises(Unroutable, match=r"no queue is bound to the topic 'orders\.new'"):
        mill.publish("orders.new", 1, mandatory=True)
    mill.queue("q").bind("orders.new")
    assert len(mill.publish("orders.new", 1, mandatory=True)) == 1
    mill.queue("q").unbind("orders.new")
    with pytest.raises(Unroutable):
        mill.publish("orders.new", 1, mandatory=True)
    assert bodies(mill, "q") == [1]


async def _bind_and_unbind(mill: Tidemill) -> list[object]:
    queue = mill.queue("mail")
    bound = [await queue.abind("a.*") for _ in range(2)]
    patterns = await queue.abindings()
    return [bound, patterns, [await queue.aunbind("a.*") for _ in range(2)]]


def test_async_code_binds_and_unbinds(mill: Tidemill) -> None:
    assert asyncio.run(_bind_and_unbind(mill)) == [[True, False], ["a.*"], [True, False]]


def test_a_deleted_queue_has_no_bindings(mill: Tidemill) -> None:
    queue = mill.queue("q")
    queue.bind("a")
    queue.delete()
    assert queue.bindings() == []
    assert mill.publish("a", 1) == []
    assert [row.name for row in mill.queues()] == []


def test_copies_have_the_options_of_the_publish(mill: Tidemill) -> None:
    mill.queue("q").bind("a")
    (job,) = mill.publish(
        "a",
        "body",
        priority=5,
        delay=60,
        ttr=7,
        retries=3,
        expires=90,
        headers={"trace": "x"},
        tags=["t"],
    )
    envelope = job.refresh().envelope
    assert job.state == "scheduled"
    assert (envelope.delay, envelope.ttr, envelope.expires, envelope.tags) == (60, 7, 90, ("t",))
    assert envelope.retries.limit == 3
    assert envelope.headers == {"trace": "x", "topic": "a"}


@pytest.mark.parametrize("option", ["id", "key", "limit"])
def test_options_of_one_job_are_refused(mill: Tidemill, option: str) -> None:
    with pytest.raises(InvalidOption, match=f"^publish takes no {option}: it would hold for one"):
        mill.publish("a", 1, **{option: "x"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"prority": 1}, "unknown option 'prority' of publish; did you mean 'priority'"),
        ({"headers": {"topic": "x"}}, "publish sets the header 'topic' itself"),
        ({"headers": 7}, "headers must map strings to strings"),
        ({"delay": 1, "at": 5.0}, "either delay or at"),
        ({"txn": object()}, "txn"),
    ],
)
def test_a_wrong_option_is_named(mill: Tidemill, options: dict[str, Any], why: str) -> None:
    mill.queue("q").bind("a")
    with pytest.raises(TidemillError, match=why):
        mill.publish("a", 1, **options)
    assert bodies(mill, "q") == []


def test_wrong_topics_and_patterns_are_refused(mill: Tidemill) -> None:
    with pytest.raises(InvalidOption, match=r"topic 'a\.\.b' has an empty word"):
        mill.publish("a..b", 1)
    for act in (mill.queue("q").bind, mill.queue("q").unbind):
        with pytest.raises(InvalidOption, match=r"pattern 'a\.b#'"):
            act("a.b#")


# -- batches and transactions ---------------------------------------------------------------------


def test_a_batch_stores_jobs_and_copies_together_at_its_end(mill: Tidemill) -> None:
    mill.queue("a").bind("x")
    with mill.batch():
        first = mill.queue("a").put("before")
        copies = mill.publish("x", "copy")
        last = mill.queue("b").put("after")
        assert copies == []
        mill.queue("b").bind("x")  # a binding of before the end counts

    assert [job.placed for job in (first, *copies, last)] == ["created"] * 4
    assert bodies(mill, "a") == ["before", "copy"]
    assert bodies(mill, "b") == ["copy", "after"]


def test_a_batch_that_fails_publishes_nothing(mill: Tidemill) -> None:
    mill.queue("a").bind("x")

    def batch(topic: str, then: Callable[[], object]) -> None:
        with mill.batch():
            mill.publish("x", 1)
            mill.queue("a").put(2)
            mill.publish(topic, 3, mandatory=True)
            then()

    with pytest.raises(ZeroDivisionError):
        batch("x", lambda: 1 // 0)
    with pytest.raises(Unroutable):
        batch("nobody", lambda: None)
    assert bodies(mill, "a") == []
    batch("x", lambda: None)
    assert bodies(mill, "a") == [1, 2, 3]


def test_copies_of_a_transaction_exist_if_it_commits(tmp_path: Path) -> None:
    env = lmdb.open(str(tmp_path / "data"), max_dbs=40, map_size=1 << 28)
    with Tidemill(env=env) as mill:
        mill.queue("a").bind("x")
        with env.begin(write=True) as txn:
            assert len(mill.publish("x", 1, txn=txn)) == 1
        with env.begin(write=True) as txn:
            assert len(mill.publish("x", 2, txn=txn)) == 1
            txn.abort()
        with pytest.raises(InvalidOption, match="txn inside a batch"), mill.batch():
            mill.publish("x", 3, txn=object())
        assert bodies(mill, "a") == [1]
    env.close()


# -- asyncio, signatures, features ----------------------------------------------------------------


def test_apublish_is_as_publish(mill: Tidemill) -> None:
    mill.queue("a").bind("x")

    async def main() -> None:
        many = await asyncio.gather(*[mill.apublish("x", n) for n in range(20)])
        assert [len(jobs) for jobs in many] == [1] * 20
        with pytest.raises(Unroutable):
            await mill.apublish("y", 1, mandatory=True)
        async with mill.batch():
            jobs = await mill.apublish("x", 20)
        assert len(jobs) == 1

    asyncio.run(main())
    assert sorted(bodies(mill, "a")) == list(range(21))


def test_each_copy_is_signed_for_itself(make_mill: MillMaker) -> None:
    mill = make_mill(secret_keys=["k"])
    mill.queue("a").bind("x")
    mill.queue("b").bind("x")
    mill.publish("x", 1)
    assert bodies(mill, "a") == bodies(mill, "b") == [1]


def test_a_broker_without_topics_refuses_them_before_it_is_opened() -> None:
    mill = Tidemill("amqp://127.0.0.1:1/")
    for call in (
        lambda: mill.publish("a", 1),
        lambda: mill.queue("q").bind("a"),
        lambda: mill.queue("q").unbind("a"),
        lambda: mill.queue("q").bindings(),
    ):
        with pytest.raises(FeatureMissing, match="needs the feature topics, which amqp://"):
            call()


WORDS = st.sampled_from(["a", "b"])
PATTERNS = st.lists(st.one_of(WORDS, st.sampled_from("*#")), min_size=1, max_size=4).map(".".join)


@pytest.fixture(scope="module")
def memory() -> Iterator[Tidemill]:
    with Tidemill("memory://") as mill:
        yield mill


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from("pqr"), st.sets(PATTERNS, max_size=3)),
    st.lists(WORDS, min_size=1, max_size=4).map(".".join),
)
def test_random_bindings_route_as_their_patterns_say(
    memory: Tidemill, bound: dict[str, set[str]], topic: str
) -> None:
    for queue, patterns in bound.items():
        for pattern in patterns:
            memory.queue(queue).bind(pattern)
    expected = {q for q, some in bound.items() if any(matches(p, topic) for p in some)}

    jobs = memory.publish(topic, 1)

    assert {job.refresh().envelope.queue for job in jobs} == expected
    assert len(jobs) == len(expected)
    for queue, patterns in bound.items():
        for pattern in patterns:
            assert memory.queue(queue).unbind(pattern)
