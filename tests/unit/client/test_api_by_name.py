"""A call by name has the options that a worker of the task has declared, or is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moved_clock import MovedClock
from servers import rabbitmq_url

from tidemill import InvalidOption, Key, Limit, Retries, Tidemill, chain
from tidemill.client import declarations
from tidemill.core.envelope import Envelope
from tidemill.errors import FeatureMissing, TaskNotFound
from tidemill.testing import run_all

OPTIONS: dict[str, Any] = {
    "queue": "mail",
    "priority": 7,
    "retries": Retries(5, delay=2, cap=60),
    "timeout": 30,
    "expires": 600,
    "key": Key("one", on_conflict="reject", hold=60),
    "result_ttl": 120,
    "limit": Limit("10/s", burst=3, concurrency=2, key="eu", cost=2, name="smtp"),
    "tags": ["a", "b"],
}


def send(to: int) -> None: ...


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/jobs"


@pytest.fixture
def producer(url: str) -> Iterator[Tidemill]:
    """An app that has imported no task."""
    with Tidemill(url, retries=1, queue="producer") as mill:
        yield mill


def start_worker(url: str, **options: Any) -> None:
    """Start and end a worker of an app that declares ``app.send`` with these options."""
    with Tidemill(url) as mill:
        mill.task(name="app.send", **options)(send)
        run_all(mill, queues=["none"])


def envelope(mill: Tidemill, job: Any) -> Envelope:
    return mill.job(job.id).refresh().envelope


def alike(envelope: Envelope) -> dict[str, Any]:
    """The parts of an envelope that options make."""
    unlike = ("id", "created", "body", "text")
    names = [name for name in Envelope.__struct_fields__ if name not in unlike]
    return {name: getattr(envelope, name) for name in names}


def test_all_declared_options_travel(producer: Tidemill, url: str) -> None:
    # given a worker that has started and ended
    start_worker(url, **OPTIONS)
    # when a producer calls its task by name
    job = producer.enqueue("app.send", 1)
    # then the job is as the worker's own app makes it
    with Tidemill(url) as mill:
        own = mill.runtime.envelope(mill.task(name="app.send", **OPTIONS)(send).call(1))
    assert alike(envelope(producer, job)) == alike(own)
    assert own.limit.name == "smtp"


def test_options_of_the_call_go_before_declared_ones(producer: Tidemill, url: str) -> None:
    start_worker(url, **OPTIONS)
    call = producer.call("app.send", 1).using(priority=1, delay=60, key="two")
    found = envelope(producer, producer.enqueue(call.using(at=4102444800, tags=["c"])))
    assert (found.key, found.tags, found.delay, found.at) == ("two", ("c",), 0, 4102444800)
    assert (found.on_conflict, found.unique) == ("keep", None)  # a key replaces the whole key
    assert (found.queue, found.retries.limit) == ("mail", 5)
    with pytest.raises(InvalidOption, match=r"unknown option 'qeueu'.*'queue'"):
        call.using(qeueu="q")
    with pytest.raises(InvalidOption, match="priority must be"):
        call.using(priority=1000)


def test_a_task_that_no_worker_has_declared_is_refused(
    producer: Tidemill, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock(monkeypatch, speed=0.01)
    with pytest.raises(TaskNotFound, match=r"'app.send' is no task .* give the call a queue= to"):
        producer.enqueue("app.send", 1)
    assert producer.jobs().page().records == []
    # its queue makes the policy plain: this app's defaults
    job = producer.enqueue(producer.call("app.send", 1).using(queue="q"))
    assert (envelope(producer, job).queue, envelope(producer, job).retries.limit) == ("q", 1)
    # a worker starts, and the refusal ends
    start_worker(url, queue="mail")
    clock.advance(declarations.ABSENT + 0.1)
    assert envelope(producer, producer.enqueue("app.send", 1)).queue == "mail"
    with pytest.raises(TaskNotFound, match=r"did you mean 'app.send'\?"):
        producer.enqueue("app.sedn", 1)


def test_an_allowed_path_has_the_defaults_of_the_app_unless_declared(url: str) -> None:
    start_worker(url, queue="mail")
    with Tidemill(url, allow_imports=["math.*", "app.*"], retries=1) as mill:
        path = envelope(mill, mill.enqueue("math.copysign", 2, -2))
        assert (path.queue, path.retries.limit) == ("default", 1)
        assert envelope(mill, mill.enqueue("app.send", 1)).queue == "mail"


@pytest.mark.parametrize(
    ("option", "computed", "given"),
    [
        ("key", {"key": lambda to: f"to {to}"}, {"key": "to 1"}),
        ("limit", {"limit": Limit("1/s", key=lambda to: to)}, {"limit": Limit("1/s", key="1")}),
        ("limit", {"limit": Limit("1/s", cost=lambda to: to)}, {"limit": Limit("1/s", cost=2)}),
    ],
)
def test_a_computed_option_must_be_given_to_a_call_by_name(
    producer: Tidemill, url: str, option: str, computed: dict[str, Any], given: dict[str, Any]
) -> None:
    start_worker(url, queue="mail", **computed)
    with pytest.raises(InvalidOption, match=rf"the {option} of task 'app.send' is computed by a"):
        producer.enqueue("app.send", 1)
    assert producer.jobs().page().records == []
    job = producer.enqueue(producer.call("app.send", 1).using(**given))
    found = envelope(producer, job)
    assert found.queue == "mail"
    assert found.key == given.get("key", "")
    assert (found.limit is not None) == (option == "limit")


def test_the_latest_declaration_is_read_after_some_seconds(
    producer: Tidemill, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock(monkeypatch, speed=0.01)
    start_worker(url, queue="old")
    assert envelope(producer, producer.enqueue("app.send", 1)).queue == "old"
    start_worker(url, queue="new")
    assert envelope(producer, producer.enqueue("app.send", 1)).queue == "old"
    clock.advance(declarations.FRESH + 1)
    assert envelope(producer, producer.enqueue("app.send", 1)).queue == "new"


def test_a_producer_reads_once_for_many_calls(
    producer: Tidemill, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MovedClock(monkeypatch, speed=0.01)
    start_worker(url, queue="mail")
    reads: list[Any] = []
    read = producer.broker.schedules
    monkeypatch.setattr(producer.broker, "schedules", lambda n: reads.append(n) or read(n))
    jobs = producer.enqueue_many(producer.call("app.send", n) for n in range(100))
    producer.enqueue("app.send", 1)
    assert {envelope(producer, job).queue for job in jobs} == {"mail"}
    assert len(reads) == 1


def test_every_way_to_enqueue_knows_declared_options(producer: Tidemill, url: str) -> None:
    start_worker(url, queue="mail", retries=7)
    call = producer.call("app.send", 1)
    steps = producer.enqueue(chain(call, producer.call("app.send").using(queue="second")))
    hooked = producer.enqueue(call.on_success(producer.call("app.send")))
    with producer.batch():
        batched = producer.enqueue("app.send", 1)
    producer.schedules.add("s", call, every=60)
    by_schedule = producer.schedules.run("s")

    async def enqueue() -> list[Any]:
        one = await producer.aenqueue("app.send", 1)
        return [one, *await producer.aenqueue_many([call, call])]

    found = [envelope(producer, job) for job in (*steps.steps, hooked, batched, by_schedule)]
    found += [envelope(producer, job) for job in asyncio.run(enqueue())]
    assert [e.queue for e in found] == ["mail", "second", *["mail"] * 6]
    assert {e.retries.limit for e in found} == {7}


def test_in_a_transaction_of_the_caller_declared_options_hold(tmp_path: Path) -> None:
    import lmdb

    env = lmdb.open(str(tmp_path), max_dbs=40, map_size=1 << 30)
    with Tidemill(env=env) as mill, Tidemill(env=env) as producer:
        mill.task(name="app.send", queue="mail")(send)
        run_all(mill, queues=["none"])
        with env.begin(write=True) as txn:
            call = producer.call("app.send", 1).using(txn=txn)
            job = producer.enqueue(call)
        assert envelope(producer, job).queue == "mail"
    env.close()


def test_inline_calls_read_no_store() -> None:
    mill = Tidemill(sync=True, allow_imports=["math.*"])
    assert mill.enqueue("math.copysign", 2, -2).result() == -2
    with pytest.raises(TaskNotFound, match="matches none of allow_imports; import the module"):
        mill.enqueue("app.send", 1)


@pytest.mark.everyday
def test_rabbitmq_alone_keeps_no_declarations() -> None:
    with Tidemill(rabbitmq_url()) as mill:
        with pytest.raises(FeatureMissing, match=r"amqp:// keeps no options of tasks; give queue="):
            mill.enqueue("app.send", 1)
        assert mill.enqueue(mill.call("app.send", 1).using(queue="by-name")).id
        mill.queue("by-name").purge()


def test_declarations_are_no_schedules(producer: Tidemill, url: str) -> None:
    start_worker(url)
    assert [*producer.schedules] == []
    producer.enqueue("app.send", 1)
    producer.schedules.add("s", producer.call("app.send", 1), every=60)
    assert [schedule.name for schedule in producer.schedules] == ["s"]
