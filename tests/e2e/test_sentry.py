"""The recipe for Sentry in docs/how-to/tracing.md, with a transport that writes to a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import Place

from tidemill import Retries

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "tracing.md"

TRANSPORT = """
import json, sentry_sdk

class ToFile(sentry_sdk.transport.Transport):
    def capture_envelope(self, envelope):
        for item in envelope.items:
            if item.type == "event":
                with open(os.path.join(HERE, "sentry"), "a") as file:
                    file.write(json.dumps(item.payload.json, default=str) + "\\n")

os.environ["SENTRY_DSN"] = "http://key@127.0.0.1:1/1"
"""

TASKS = """
@mill.task
def charge(order):
    raise RuntimeError(f"order {order} has no card")

@mill.task(expects=KeyError)
def expected():
    raise KeyError("no such order")
"""


def recipe() -> str:
    """The code of the page, which sends its events to our transport."""
    section = PAGE.read_text().partition("## Sentry\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    code = found.group(1)
    assert code.count('sentry_sdk.init(dsn=os.environ["SENTRY_DSN"])') == 1
    return code.replace('["SENTRY_DSN"])', '["SENTRY_DSN"], transport=ToFile)')


def test_sentry_gets_the_last_attempt_with_its_job(place: Place) -> None:
    # given the recipe in the module of the app
    place.write(TRANSPORT + recipe() + TASKS, load=False)
    charge = place.mill.call(place.task("charge"), 17).using(retries=Retries(1, delay=0))
    job = place.mill.enqueue(charge)
    other = place.mill.enqueue(place.mill.call(place.task("expected")).using(retries=0))
    # when the jobs have failed
    worker = place.worker()
    place.finish([job, other])
    assert worker.stop() == 0
    # then there is one event, of the last attempt
    (event,) = [json.loads(line) for line in (place.path / "sentry").read_text().splitlines()]
    (error,) = event["exception"]["values"]
    assert (error["type"], error["value"]) == ("RuntimeError", "order 17 has no card")
    assert error["stacktrace"]["frames"][-1]["function"] == "charge"
    assert event["extra"]["tidemill_job_id"] == job.id
    assert event["extra"]["tidemill_task"] == place.task("charge")
    assert (event["extra"]["tidemill_queue"], event["extra"]["tidemill_attempt"]) == ("default", 2)
    assert event["level"] == "error"


CUSTOMERS = """
import asyncio, logging

sentry_sdk.set_tag("service", "shop")
logging.getLogger("shop").warning("the app is loaded")

def serve(customer):
    sentry_sdk.set_user({"id": customer})
    if customer % 3 == 0:
        sentry_sdk.set_tag("only", str(customer))
    sentry_sdk.add_breadcrumb(message=f"crumb {customer}")
    raise RuntimeError(f"error {customer}")

@mill.task(retries=0)
def sync(customer):
    serve(customer)

@mill.task(retries=0)
async def later(customer):
    await asyncio.sleep(0)
    serve(customer)
"""


@pytest.mark.everyday("main")
@pytest.mark.parametrize(
    ("task", "slots"), [("sync", 1), ("sync", 3), ("later", 3)], ids=["main", "threads", "async"]
)
def test_a_report_has_no_data_of_other_jobs(place: Place, task: str, slots: int) -> None:
    # case M9
    place.write(TRANSPORT + recipe() + CUSTOMERS, load=False)
    jobs = [place.mill.enqueue(place.mill.call(place.task(task), n)) for n in range(9)]
    worker = place.worker(slots=slots)
    place.finish(jobs)
    assert worker.stop() == 0
    events = [json.loads(line) for line in (place.path / "sentry").read_text().splitlines()]
    assert len(events) == 9
    for event in events:
        [error] = event["exception"]["values"]
        customer = int(error["value"].removeprefix("error "))
        crumbs = [crumb["message"] for crumb in event["breadcrumbs"]["values"]]
        assert [crumb for crumb in crumbs if "crumb" in crumb] == [f"crumb {customer}"]
        assert event["user"]["id"] == customer
        only = str(customer) if customer % 3 == 0 else None
        assert event.get("tags", {}).get("only") == only
