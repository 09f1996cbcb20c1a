"""Chains, groups and flows, and the waits for them."""

from __future__ import annotations

from shop.app import enqueue_later, enqueue_soon, mill
from shop.tasks import Invoice, Report, alert, discounted, price, rate, send, sweep, total
from tidemill import Flow, Job, JobChain, JobGroup, State, as_completed, chain, group, map_many


def schedules() -> list[str]:
    mill.schedule("report", rate.call("EUR"), every="2 hours", jitter=60)
    if "usd" not in [schedule.name for schedule in mill.schedules]:
        mill.schedules.add("usd", rate.using(retries=1).call("USD"), "*/5 * * * *")
    return [schedule.name for schedule in mill.schedules if not schedule.paused]


def jobs() -> list[Job[int]]:
    one: Job[int] = price.enqueue("apple", count=3)
    later = enqueue_later(price, {"priority": 5, "tags": ["later"]}, "pear", count=2)
    soon = enqueue_soon(sweep, key=None)
    return [one, later, soon]


def invoices() -> list[Job[str]]:
    calls = [send.using(key=name).call(Invoice(name, 100)) for name in ("ann", "bob")]
    return [*mill.enqueue_many(calls), Report("taxes").build.enqueue(2026)]


def basket(items: list[str]) -> tuple[int, JobGroup[int]]:
    steps = chain(group([price.call(item) for item in items]), total, discounted.call(percent=10))
    priced = mill.enqueue(map_many(price, items).on_complete(alert.call("accounting")))
    done: JobChain[int] = mill.enqueue(steps.on_failure(alert))
    return done.result(timeout=30), priced


def flow() -> JobGroup[object]:
    plan = Flow()
    first = plan.add(price.call("apple"))
    plan.add(total.call([first, plan.add(price.call("pear"))]), waits="any")
    return mill.enqueue(plan)


async def rates() -> dict[str, float]:
    handles = [await rate.using(priority=1).aenqueue(name) for name in ("EUR", "USD")]
    async for job in as_completed(handles, timeout=30):
        assert job.state is State.SUCCEEDED
    return {"EUR": await handles[0], "USD": await handles[1], "now": await rate("EUR")}


def failures() -> list[str]:
    return [job.error for job in mill.jobs(state=State.FAILED, task=price)]
