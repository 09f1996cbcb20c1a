"""Each number on a page that links to jobs is the number of the jobs in that list."""

from __future__ import annotations

import pytest
from dashboard_desk import Visitor, counted, listed, numbers

from tidemill import Fail, Limit, Retry, Tidemill, group
from tidemill.testing import run_all

PAGES = (
    *("/", "/queues", "/queues/mail", "/failed", "/tasks", "/tasks/shop.pay", "/limits"),
    *("/jobs", "/jobs?q=queue:mail", "/?over=24h"),
)


@pytest.fixture
def anna(mill: Tidemill) -> Visitor:
    """A store with jobs of all kinds, in which nothing happens now."""

    @mill.task(name="shop.pay", queue="mail", retries=1, limit=Limit("100/s", name="bank"))
    def pay(order: int) -> int:
        if order % 5 == 0:
            raise Fail(f"no order {order}")
        if order % 7 == 0:
            raise Retry(delay=500)
        return order

    mill.enqueue_many([pay.call(n) for n in range(40)])
    mill.enqueue(group([pay.call(1), pay.call(2)]))
    run_all(mill)
    mill.enqueue_many([pay.call(n).using(delay=900) for n in range(3)])
    mill.enqueue_many([pay.call(n).using(queue="other") for n in range(4)])
    mill.queue("inbox").put_many(["a", "b"])
    mill.queue("inbox").get(timeout=0)
    mill.job(mill.enqueue(pay.call(1)).id).cancel()
    return Visitor(mill)


def test_each_number_is_the_length_of_its_list(mill: Tidemill, anna: Visitor) -> None:
    checked: dict[str, int] = {}
    for path in PAGES:
        for link, number in numbers(anna.get(path)):
            assert listed(anna.get, link) == number, (path, link)
            assert counted(anna.get(link)) == number, (path, link)
            checked[link] = number
    # and these are the numbers of all states, and more
    assert len(checked) > 15
    assert sum(number > 0 for number in checked.values()) >= 10


def test_where_history_outlives_jobs_the_list_says_both_numbers(
    mill: Tidemill, anna: Visitor
) -> None:
    [failed] = [link for link, n in numbers(anna.get("/failed")) if "failure" in link][:1]
    jobs = [job.id for job in mill.jobs(state="failed", task="shop.pay")]
    mill.broker.delete(jobs[:3])
    text = anna.get(failed)
    assert counted(text) == len(jobs) - 3
    assert f"{len(jobs)} counted" in text


def test_the_export_has_the_jobs_of_the_list(anna: Visitor) -> None:
    lines = anna.get("/jobs.json?q=state:failed").splitlines()
    assert len(lines) == listed(anna.get, "/jobs?q=state:failed")
