"""Limits as users write them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest

from tidemill import Breaker, InvalidOption, Limit, Tidemill, chain
from tidemill.client.explain import explain_in
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.limits.arithmetic import LimitStats
from tidemill.limits.declare import rate_text, terms_text


@pytest.fixture
def mill() -> Iterator[Tidemill]:
    with Tidemill("memory://") as mill:
        yield mill


def claim_of(mill: Tidemill, job_id: str) -> JobLimit:
    record = mill.broker.get(job_id)
    return record.envelope.limit


def only(mill: Tidemill) -> LimitStats:
    (row,) = mill.limits.list()
    return row


@pytest.mark.parametrize(
    ("text", "rate", "burst"),
    [
        ("10/s", (10, 1), 10),
        ("100/m", (100, 60), 100 / 60),
        ("5000/h", (5000, 3600), 5000 / 3600),
        ("1/d", (1, 86400), 1),
        ("10/30s", (10, 30), 1),
        ("0.5/s", (0.5, 1), 1),
        ("0/s", (0, 1), 1),
    ],
)
def test_a_rate_as_text(text: str, rate: tuple[float, float], burst: float) -> None:
    assert Limit(text).terms == LimitSettings(rate=rate, burst=burst)
    assert rate_text(rate) == text


@pytest.mark.parametrize(
    ("options", "field"),
    [
        *(
            ({"rate": text}, "rate")
            for text in (
                *("", "10", "ten/s", "10/x", "10 / s", "-1/s", "10/s ", "1e3/s", "10/0s", "nan/s"),
                *("10/sec", "10/ s", "9999999999/s", "1/99999999999d", 10),
            )
        ),
        ({"rate": "1/s", "burst": 0}, "burst"),
        ({"rate": "1/s", "burst": True}, "burst"),
        ({"rate": "1/s", "burst": float("nan")}, "burst"),
        ({"burst": 5}, "burst"),
        ({"window": "0/m"}, "window"),
        ({"window": "0.5/m"}, "window"),
        ({"window": "lots"}, "window"),
        ({"concurrency": -1}, "concurrency"),
        ({"concurrency": 1.5}, "concurrency"),
        ({"rate": "1/s", "cost": -1}, "cost"),
        ({"rate": "1/s", "cost": "much"}, "cost"),
        ({"rate": "1/s", "key": ""}, "key of a limit"),
        ({"rate": "1/s", "name": "a\nb"}, "name of a limit"),
        ({}, "a limit needs"),
    ],
)
def test_a_mistake_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidOption, match=rf"\A{field}"):
        Limit(**options)


def test_a_task_takes_a_rate_or_a_limit(mill: Tidemill) -> None:
    @mill.task(name="plain", limit="10/s")
    def plain() -> None: ...

    @mill.task(
        name="per_user",
        limit=Limit("1/s", key=lambda user, size=1: user, cost=lambda user, size=1: size),
    )
    def per_user(user: int, size: int = 1) -> None: ...

    assert claim_of(mill, plain.enqueue().id) == JobLimit(
        "plain", "", 1, LimitSettings((10, 1), 10)
    )
    assert claim_of(mill, per_user.enqueue(7).id) == JobLimit(
        "per_user", "7", 1, LimitSettings((1, 1), 1)
    )
    assert claim_of(mill, per_user.enqueue(8, size=3).id).cost == 3
    shared = plain.using(limit=Limit(concurrency=2, name="api", key="fixed")).enqueue()
    assert claim_of(mill, shared.id) == JobLimit("api", "fixed", 1, LimitSettings(concurrency=2))
    with pytest.raises(InvalidOption, match=r"\Acost"):
        per_user.enqueue(7, size=-1)
    with pytest.raises(InvalidOption, match=r"\Alimit must be"):
        mill.task(limit=5)(lambda: None)


def test_a_queue_is_limited_where_it_is_named_and_at_run_time(mill: Tidemill) -> None:
    minute = dt.timedelta(minutes=1)
    orders = mill.queue("orders", rate="10/s", burst=20, breaker=Breaker(3, minute))
    terms = LimitSettings((10, 1), 20, breaker=(3, 60))
    assert only(mill).terms == terms
    orders.limit(concurrency=2, breaker=None)
    assert only(mill).terms == LimitSettings((10, 1), 20, concurrency=2)
    mill.queue("orders", rate="10/s", burst=20, breaker=Breaker(3, 60))  # another worker starts
    assert only(mill).terms == LimitSettings((10, 1), 20, concurrency=2)
    orders.limit(rate="30/m", concurrency=None)
    assert only(mill).terms == LimitSettings((30, 60), 20)  # what is not given stays
    orders.limit(burst=None)
    assert only(mill).terms == LimitSettings((30, 60), 1)
    mill.queue("orders", breaker=4)
    assert only(mill).terms == LimitSettings((30, 60), 1)  # it was set by hand
    mill.limits.reset_queue("orders")
    assert only(mill).terms == LimitSettings((10, 1), 20, breaker=(4, 30))  # what code says adds up
    mill.queue("orders", concurrency=7)
    assert only(mill).terms == LimitSettings((10, 1), 20, concurrency=7, breaker=(4, 30))
    mistakes: list[Any] = [{"rates": "1/s"}, {"breaker": 0}, {"breaker": Breaker(1, -1)}]
    for wrong in [*mistakes, {"rate": None, "burst": 2}]:
        with pytest.raises(InvalidOption):
            orders.limit(**wrong)
    with pytest.raises(InvalidOption, match="rates"):
        mill.queue("orders", rates="1/s")  # type: ignore[call-arg]


def test_a_limit_changes_by_name(mill: Tidemill) -> None:
    @mill.task(name="work", limit="10/s")
    def work() -> None: ...

    work.enqueue()
    mill.limits.set("work", rate="20/s", window="100/m")
    assert only(mill).terms == LimitSettings((20, 1), 20, window=(100, 60))
    work.enqueue()
    assert only(mill).terms == LimitSettings((20, 1), 20, window=(100, 60))
    with pytest.raises(InvalidOption, match="breaker"):
        mill.limits.set("work", breaker=3)
    with pytest.raises(InvalidOption, match="give a setting of the limit 'work'"):
        mill.limits.set("work")


def test_terms_in_words() -> None:
    terms = LimitSettings((10, 30), 5, (100, 60), 3, (2, 30))
    assert terms_text(terms) == (
        "10/30s, burst 5, at most 100/m, 3 at a time, breaker: 30 s after 2 failures"
    )
    assert terms_text(LimitSettings()) == ""


def told(mill: Tidemill, job_id: str) -> str:
    record = mill.broker.get(job_id)
    return explain_in(mill.broker, record)


def test_explain_names_the_limit_and_its_opening_time(mill: Tidemill) -> None:
    orders = mill.queue("orders", rate="1/h", concurrency=1)
    first, second = orders.put_many([1, 2])
    message = orders.get(timeout=0)
    assert message is not None
    assert told(mill, second.id) == ("It waits for the limit of queue 'orders': 1 of 1 are running")
    message.bury()
    assert "queue 'orders', 1/h, burst 1, 1 at a time; the next job may start in" in told(
        mill, second.id
    )
    orders.limit(rate="0/s")
    assert "rate of 0 lets nothing start" in told(mill, second.id)
    orders.limit(rate=None, breaker=1)
    message = orders.get(timeout=0)
    message.bury()
    assert first.retry()
    assert "breaker of queue 'orders': 1 attempt failed in a row; the next" in told(mill, first.id)
    keyed = orders.put(3, limit=Limit(concurrency=0, key="ada"))
    assert told(mill, keyed.id) == (
        "It waits for the limit of 'orders' for key 'ada': 0 of 0 are running"
    )


def test_a_call_in_the_caller_has_no_limit() -> None:
    with Tidemill("redis://nowhere.invalid", sync=True) as mill:

        @mill.task(name="work", limit="1/h")
        def work() -> int:
            return 5

        assert [work.enqueue().result() for _ in range(3)] == [5, 5, 5]


def work(user: int = 0) -> None: ...


def test_tasks_that_share_a_limit_agree_on_it(mill: Tidemill) -> None:
    mill.task(name="one", limit=Limit("10/s", name="api"))(work)
    mill.task(name="two", limit=Limit("10/s", name="api", key="k"))(work)
    with pytest.raises(
        InvalidOption, match=r"the limit 'api' of task 'three' has other settings in task 'one'"
    ):
        mill.task(name="three", limit=Limit("20/s", name="api"))(work)


@pytest.mark.parametrize("what", ["key", "cost"])
def test_a_limit_by_arguments_that_are_not_known_yet_is_refused(mill: Tidemill, what: str) -> None:
    @mill.task(name="find")
    def find() -> int: ...  # type: ignore[empty-body]

    by_user = Limit("1/s", **{what: lambda user: user})  # type: ignore[arg-type]
    mail = mill.task(name="mail", limit=by_user)(work)
    with pytest.raises(InvalidOption, match=f"the {what} of the limit of 'mail' is a function"):
        mill.enqueue(chain(find.call(), mail))
    fixed = mail.using(limit=Limit("1/s", key="fixed"))
    mill.enqueue(chain(find.call(), fixed))
