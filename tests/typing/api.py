"""The API as type checkers must see it. Read by mypy strict and pyright, never run.

A line that ends in ``type: ignore[…]`` is an error that must be found: both checkers complain of an
ignore that was not needed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Unpack, assert_type

from tidemill import (
    Breaker,
    Call,
    Chain,
    Ended,
    Flow,
    Group,
    Job,
    JobChain,
    JobContext,
    JobGroup,
    Key,
    Limit,
    Message,
    Retries,
    Schedule,
    State,
    Tidemill,
    When,
    as_completed,
    chain,
    group,
    map_many,
    this_job,
)
from tidemill.typing import CallOptions, PartialCall, PutOptions, TaskOptions

mill = Tidemill("memory://", retries=3)


@mill.task
def plain(path: str, width: int = 640) -> str:
    return path * width


@mill.task(queue="images", retries=Retries(5, on=OSError, never=("a.B",)), timeout=30)
def configured(path: str, *, width: int = 640) -> list[str]:
    return [path] * width


@mill.task
async def fetch(url: str) -> bytes:
    return url.encode()


@mill.task(queue="net")
async def head(url: str, follow: bool = True) -> int | None:
    return len(url) if follow else None


class Report:
    @mill.task
    def build(self, year: int) -> str:
        return str(year)

    @mill.task(name="send")
    async def send(self, to: str) -> bool:
        return bool(to)


def options_are_typed() -> None:
    minute, noon = timedelta(minutes=1), datetime(2030, 1, 1, 12, tzinfo=UTC)
    Tidemill(retries=Retries(5, delay=60), timeout=minute, queue=None)
    Tidemill(retires=3)  # type: ignore[call-arg]
    Tidemill(timeout=[5])  # type: ignore[arg-type]

    mill.task(retries=3, key=lambda path: str(path), limit="10/s", tags=["a"], timeout=None)
    mill.task(key=Key("k", on_conflict="replace", max_wait=minute), limit=Limit(concurrency=1))
    mill.task(quue="images")  # type: ignore[call-overload]
    mill.task(delay=5)  # type: ignore[call-overload]
    mill.task(retries="3")  # type: ignore[call-overload]
    mill.task(schedule=5.5, name="n")
    mill.task(schedule=[5])  # type: ignore[call-overload]

    plain.using(delay=minute, at=None, id="a", headers={"a": "b"}, key=Key(lambda path: "k"))
    plain.using(at=noon, tags=("a", "b"), expires=5, ttr=3)  # type: ignore[call-arg]
    plain.using(dealy=5)  # type: ignore[call-arg]
    plain.delay()  # type: ignore[attr-defined]
    plain.using(delay=[5])  # type: ignore[arg-type]
    plain.using(tags="a")  # type: ignore[arg-type]
    Key("k", on_conflict="ignore")  # type: ignore[arg-type]
    plain.using(on_conflict="keep")  # type: ignore[call-arg]
    plain.using(delay=5).using(quue="q")  # type: ignore[call-arg]
    plain.call("a").using(priorty=5)  # type: ignore[call-arg]
    fetch.using(limit=5)  # type: ignore[arg-type]
    assert_type(fetch.using(delay=5).enqueue("u"), Job[bytes])


def queues_and_searches_are_typed() -> None:
    orders = mill.queue("orders", rate="5/s", breaker=3)
    mill.queue("orders", max_szie=5)  # type: ignore[call-arg]
    mill.queue("orders", rate=5)  # type: ignore[arg-type]
    assert_type(orders.put("a", delay="5 minutes", ttr=timedelta(hours=1), timeout=3), Job[Any])
    orders.put("a", dealy=5)  # type: ignore[call-arg]
    orders.put("a", id=5)  # type: ignore[arg-type]
    orders.put("a", queue="b")  # type: ignore[call-arg]
    orders.put_many(["a"], priorty=5)  # type: ignore[call-arg]
    orders.envelope("a", retries="3")  # type: ignore[arg-type]
    orders.limit(rate=None, breaker=Breaker(3))
    orders.limit(rat="5/s")  # type: ignore[call-arg]
    mill.limits.set("plain", breaker=3)  # type: ignore[call-arg]
    mill.limits.set_queue("orders", concurrency="3")  # type: ignore[arg-type]
    assert_type(list(mill.jobs(state=["failed"], task=plain)), list[Job[Any]])
    mill.jobs(stat="failed")  # type: ignore[call-arg]


def options_may_be_passed_on(**options: Unpack[CallOptions]) -> None:
    defaults: TaskOptions = {"retries": 3, "timeout": 5}
    message: PutOptions = {"ttr": 5}
    Tidemill(**defaults)
    mill.task(**defaults)(len)
    plain.using(**options)
    mill.queue("q").put("a", **message)
    mill.queue("q").put("a", **options)  # type: ignore[misc]
    wrong: CallOptions = {"dealy": 5}  # type: ignore[typeddict-unknown-key]
    plain.using(**wrong)


def calls_are_unchanged() -> None:
    assert_type(plain("a", width=3), str)
    assert_type(configured("a", width=3), list[str])
    assert_type(Report().build(2026), str)
    plain(1)  # type: ignore[arg-type]
    configured("a", 3)  # type: ignore[call-arg]


def the_running_job_is_known() -> None:
    assert_type(this_job(), JobContext)
    assert_type(this_job(None), JobContext | None)
    assert_type(this_job(default=None), JobContext | None)
    assert_type(this_job().args, tuple[Any, ...])
    assert_type(this_job().kwargs, Mapping[str, Any])
    this_job().kwargs["a"] = 1  # type: ignore[index]


def jobs_know_their_result() -> None:
    assert_type(plain.enqueue("a", width=3), Job[str])
    assert_type(plain.enqueue("a").result(timeout=5), str)
    assert_type(plain.using(delay=5, priority=1).enqueue("a"), Job[str])
    assert_type(plain.using(delay=5).using(key="k").call("a"), Call[str])
    assert_type(mill.call("by.name", 1, b=2), Call[Any])
    plain.delay("a")  # type: ignore[attr-defined]
    plain.using(delay=5).s("a")  # type: ignore[attr-defined]
    assert_type(configured.enqueue("a", width=1), Job[list[str]])
    assert_type(fetch.enqueue("http://localhost"), Job[bytes])
    assert_type(head.using(at=1.5).enqueue("u", follow=False), Job[int | None])
    assert_type(Report().build.enqueue(2026), Job[str])
    assert_type(Report().send.enqueue("me"), Job[bool])
    plain.enqueue(1)  # type: ignore[arg-type]
    plain.enqueue()  # type: ignore[call-arg]
    plain.enqueue("a", wdith=3)  # type: ignore[call-arg]
    plain.using(delay=1).enqueue(b"a")  # type: ignore[arg-type]
    fetch.enqueue(b"u")  # type: ignore[arg-type]
    Report().build.enqueue("2026")  # type: ignore[arg-type]


def calls_that_are_not_made() -> None:
    assert_type(plain.call("a"), Call[str])
    assert_type(fetch.call("u"), Call[bytes])
    assert_type(mill.enqueue(plain.call("a")), Job[str])
    assert_type(mill.enqueue_many(plain.call(p) for p in "abc"), list[Job[str]])
    assert_type(mill.enqueue_many([fetch.call("u")]), list[Job[bytes]])
    plain.call(b"a")  # type: ignore[call-overload]
    assert_type(plain.call(3), PartialCall[str])  # lacks the path, which a chain could give
    mill.enqueue(plain.call(3))  # type: ignore[call-overload]
    mill.enqueue_many([plain.call()])  # type: ignore[arg-type]
    with mill.batch():
        assert_type(plain.enqueue("a"), Job[str])


@mill.task
def told(ended: Ended, why: str = "") -> None: ...


def compositions() -> None:
    assert_type(chain(plain.call("a"), fetch, plain.call()), Chain[Any])
    assert_type(mill.enqueue(chain(plain.call("a"), fetch)), JobChain[Any])
    assert_type(group([plain.call("a")]), Group[str])
    assert_type(group([plain.call("a"), chain(fetch)]), Group[Any])
    assert_type(mill.enqueue(map_many(plain, ["a", ("b", 2)])), JobGroup[str])
    assert_type(mill.enqueue(map_many(fetch, ["a"])).result(timeout=1), list[bytes])
    assert_type(mill.enqueue(plain.call("a").on_failure(told)), Job[str])
    assert_type(mill.enqueue(map_many(plain, "ab").on_success(told.call())), JobGroup[str])
    assert_type(chain(plain.call("a"), plain.call(width=3), group([plain.call(3)])), Chain[Any])
    assert_type(mill.enqueue(plain.call("a").on_failure(told.call("why"))), Job[str])
    assert_type(told.using(delay=5).call("why").using(priority=5), PartialCall[None])
    plain.call("a").on_failure(told.call(5))  # type: ignore[call-overload]
    flow = Flow().using(id="f")
    node = flow.add(plain.call("a"), after=[flow.add(fetch)])
    assert_type(node, str)  # it stands for the result
    assert_type(flow.add(configured.call(node), after=[node]), list[str])
    flow.add(head.call(flow.add(fetch)))  # type: ignore[call-overload]
    flow.add(plain.call("a"), waits="al")  # type: ignore[call-overload]
    assert_type(mill.enqueue(flow), JobGroup[Any])
    assert_type(mill.group("f").progress, tuple[int, int])
    for name in as_completed(mill.enqueue(map_many(plain, "ab")), timeout=1, progress=True):
        assert_type(name, Job[str])
    for size in as_completed([fetch.enqueue("a")]):
        assert_type(size, Job[bytes])
    chain(5)  # type: ignore[arg-type]
    group(plain.call("a"))  # type: ignore[call-overload]


def states() -> None:
    job = plain.enqueue("a")
    assert_type(job.state, State)
    assert_type(job.wait(timeout=1), State)
    assert_type(job.cancel(terminate=True), bool)
    assert_type(job.id, str)


async def in_asyncio() -> None:
    assert_type(await fetch("u"), bytes)
    assert_type(await fetch.using(retries=Retries(1))("u"), bytes)
    assert_type(await Report().send("me"), bool)
    assert_type(await plain.aenqueue("a"), Job[str])
    assert_type(await (await plain.aenqueue("a")), str)
    assert_type(await fetch.enqueue("u"), bytes)
    assert_type(await head.using(delay=1).enqueue("u").aresult(timeout=3), int | None)
    assert_type(await plain.enqueue("a").await_end(), State)
    assert_type(await mill.aenqueue(fetch.call("u")), Job[bytes])
    assert_type(await mill.aenqueue_many([plain.call("a")]), list[Job[str]])
    assert_type(await mill.aenqueue(map_many(plain, "ab")), JobGroup[str])
    assert_type(await mill.enqueue(map_many(plain, "ab")), list[str])
    async for job in mill.enqueue(map_many(plain, "ab")):
        assert_type(job, Job[str])
    async with mill.batch():
        await plain.aenqueue(1)  # type: ignore[arg-type]


async def messages() -> None:
    orders = mill.queue("orders", max_size=5)
    assert_type(orders.get(timeout=5), Message | None)
    assert_type(mill.get(["a", "b"]), Message | None)
    assert_type(await orders.aget(), Message | None)
    for message in orders:
        assert_type(message, Message)
        assert_type(message.ack(), bool)
    async for message in orders:
        assert_type(message, Message)
        assert_type(await message.aack(), bool)
        assert_type(await message.arelease(delay=5), bool)
        await message.arelease(dealy=5)  # type: ignore[call-arg]
    orders.get([5])  # type: ignore[arg-type]
    assert_type(await orders.aput("a", timeout=5, txn=None), Job[Any])
    await orders.aput("a", dealy=5)  # type: ignore[call-arg]
    await orders.aput_many(["a"], tags="a")  # type: ignore[arg-type]


@mill.around
def opened(context: JobContext) -> Iterator[None]:
    yield


@mill.around
async def aopened(context: JobContext) -> AsyncIterator[None]:
    yield


@mill.around
async def again(call_next: Callable[[], Any], context: JobContext) -> Any:
    return await call_next()


@mill.around  # type: ignore[type-var]
def no_context() -> None: ...


def late() -> None:
    assert_type(opened(this_job()), Iterator[None])
    mill.configure("memory://", secret_keys=["k"])
    mill.configure(sync=True)  # type: ignore[call-arg]


@mill.task(schedule="0 3 * * *")
def nightly() -> None: ...


@mill.task(schedule=When(every="month", zone="Europe/Berlin"))
async def monthly() -> int:
    return 1


def schedules() -> None:
    mill.schedule("s", plain.call("a", width=2), every=30)
    mill.schedule("s", plain.call(1), "* * * * *")  # type: ignore[arg-type]
    assert_type(mill.schedules.add("s", plain.call("a"), every=30), Schedule)
    mill.schedule("s", plain.call("a"), evry=30)  # type: ignore[call-arg]
    mill.schedule("s", plain.call("a"), every=[30])  # type: ignore[arg-type]
    mill.schedules.add("s", plain.call("a"), b"* * * * *")  # type: ignore[arg-type]
    assert_type([s.name for s in mill.schedules], list[str])
    assert_type(mill.schedules.run("s"), Job[Any])
    When(every=30, jitter=[1])  # type: ignore[arg-type]
