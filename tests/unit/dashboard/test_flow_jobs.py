"""The pages of the jobs of a flow: the jobs before a job, and the code that puts it again."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from dashboard_desk import Visitor, words

from tidemill import Flow, Tidemill, chain
from tidemill.client.explain import explain_in
from tidemill.testing import run_all


@pytest.fixture
def anna(mill: Tidemill) -> Visitor:
    @mill.task(name="shop.pay", retries=0)
    def pay(order: Any) -> int:
        if order == -1:
            raise ValueError("no order")
        return 7

    @mill.task(name="shop.report")
    def report(*orders: Any, **named: Any) -> list[Any]:
        return [*orders, *named.values()]

    return Visitor(mill)


def again(text: str) -> tuple[str, str]:
    """The code in Python and the request with curl that the page shows."""
    [python, curl] = re.findall(r'<code tabindex="0">(.*?)</code>', text, re.DOTALL)
    return html.unescape(python), html.unescape(curl)


# -- the jobs before a job -------------------------------------------------------------------------


def test_a_job_that_waits_by_after_names_the_jobs_before_it(mill: Tidemill, anna: Visitor) -> None:
    pay, report = mill.tasks["shop.pay"], mill.tasks["shop.report"]
    flow = Flow()
    first, other = flow.add(pay.call(1)), flow.add(pay.call(2))
    flow.add(report.call(other), after=[first])
    handle = mill.enqueue(flow)
    job_id = f"{handle.id}.0000002"
    record = mill.broker.get(job_id)
    assert f"{handle.id}.0000000 (ready)" in explain_in(mill.broker, record)
    run_all(mill)
    page = anna.get(f"/jobs/{job_id}")
    assert "no longer kept" not in page
    for before in (f"{handle.id}.0000000", f"{handle.id}.0000001"):
        assert f'id="row-{before}"' in page.partition("Before it")[2]


def test_a_job_without_results_of_others_waited_until_the_jobs_before_it_ended(
    mill: Tidemill, anna: Visitor
) -> None:
    pay, report = mill.tasks["shop.pay"], mill.tasks["shop.report"]
    flow = Flow()
    first = flow.add(chain(pay.call(1), pay))
    flow.add(chain(report.call(), report), after=[first])
    handle = mill.enqueue(flow)
    run_all(mill)
    page = words(anna.get(f"/jobs/{handle.id}.0000001.0000"))
    assert "no longer kept" not in page
    assert "waits for jobs before it" in page
    assert "then to start" not in page


# -- the same again --------------------------------------------------------------------------------


def test_an_argument_from_another_job_gets_a_sentence(mill: Tidemill, anna: Visitor) -> None:
    pay, report = mill.tasks["shop.pay"], mill.tasks["shop.report"]
    flow = Flow()
    first = flow.add(pay.call(1))
    flow.add(report.call([first, 5], name=first))
    handle = mill.enqueue(flow)
    for code in again(anna.get(f"/jobs/{handle.id}.0000001")):
        assert code == "# an argument is the result of another job; only its flow can put this job"
    for code in again(anna.get(f"/jobs/{handle.id}")):
        assert code.startswith("# this job stands for a group or a flow")


def test_an_altered_job_is_repeated_with_its_new_queue_and_priority(
    mill: Tidemill, anna: Visitor
) -> None:
    job = mill.enqueue(mill.tasks["shop.pay"].call(1).using(queue="slow", priority=5))
    assert job.alter(queue="default", priority=0)
    python, curl = again(anna.get(f"/jobs/{job.id}"))
    copy = eval(python, {"mill": mill})
    record = mill.broker.get(copy.id)
    assert (record.envelope.queue, record.rank) == ("default", mill.broker.get(job.id).rank)  # type: ignore[union-attr]
    assert "priority=0" in python
    assert '"queue":"default","priority":0' in curl
