"""Case W5: /metrics, ``tidemill info``, ``mill.history`` and the store have the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import Place
from prometheus_client.parser import text_string_to_metric_families
from servers.http import JobServer

from tidemill import State
from tidemill.server.tokens import Role, create

APP = """
@mill.task(queue="mail")
def well(n):
    time.sleep(n % 3 / 1000)

@mill.task(queue="mail", retries=Retries(2, delay=0.01))
def flaky(n):
    if this_job().attempt < 3:
        raise OSError(f"no answer from host {n}")

@mill.task(retries=0)
def broken(n):
    raise ValueError(f"no row {n}")

@mill.task(retries=0)
def killed():
    os._exit(9)

@mill.task
def never(): ...
"""


def info(place: Place) -> dict[str, object]:
    command = [sys.executable, "-m", "tidemill", "info", "--json", "--url", place.url]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    document: dict[str, object] = json.loads(done.stdout)
    return document


def metrics(server: JobServer) -> dict[tuple[str, str, str, str], float]:
    """The values at /metrics, by name, queue, task and outcome."""
    text = server.request("GET", "/metrics").data.decode()
    return {
        (s.name, *(s.labels.get(label, "") for label in ("queue", "task", "outcome"))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if "le" not in s.labels and "state" not in s.labels
    }


def test_all_numbers_agree(place: Place) -> None:  # case W5
    # given: jobs that succeed, are retried, fail and kill their process, by two worker processes
    place.write(APP)
    jobs = [*place.enqueue_many("well", [(n,) for n in range(300)])]
    jobs += [place.enqueue("flaky", n) for n in range(10)]
    jobs += [place.enqueue("broken", n) for n in range(20)]
    place.enqueue("never").cancel()
    worker = place.worker("--release", "7", processes=2)
    place.finish(jobs)
    place.finish([place.enqueue("killed")])  # alone, since its process has no other job then
    assert worker.stop() == 0
    # when everybody says how many there were
    stored = {
        (queue, state): sum(
            record.envelope.queue == queue and record.state is state for record in place.records()
        )
        for queue in ("mail", "default")
        for state in (State.SUCCEEDED, State.FAILED, State.CANCELLED)
    }
    retried = sum(max(0, record.attempt - 1) for record in place.records())
    server = JobServer("--quiet", where=place.url)
    try:
        shown = metrics(server)
    finally:
        server.close()
    told = info(place)
    history, tasks = place.mill.history.queues(), place.mill.history.tasks()
    # then the store is right
    assert stored["mail", State.SUCCEEDED] == 310
    assert stored["default", State.FAILED] == 21
    assert stored["default", State.CANCELLED] == 1
    assert retried == 20
    # and all others say the same of the queues
    for queue in ("mail", "default"):
        (points,) = [one for one in history if one.queue == queue]
        (row,) = [one for one in told["queues"] if one["name"] == queue]  # type: ignore[attr-defined]
        for state in (State.SUCCEEDED, State.FAILED, State.CANCELLED):
            count = stored[queue, state]
            assert points.total(state) == row[state] == count
            assert shown[f"tidemill_queue_{state}_total", queue, "", ""] == count
    # and of the tasks
    last_hour = {one["task"]: one for one in told["last_hour"]}  # type: ignore[attr-defined]
    for end, count in (("succeeded", 310), ("failed", 21), ("retried", retried)):
        assert sum(getattr(one, end) for one in tasks) == count
        assert sum(one[end] for one in last_hour.values()) == count
        found = [v for k, v in shown.items() if k[0].endswith("_runs_total") and k[3] == end]
        assert sum(found) == count
    assert shown["tidemill_task_run_seconds_count", "mail", place.task("well"), ""] == 300
    # and of the failures
    failures = {one.task: one for one in place.mill.history.failures()}
    assert {name: one.count for name, one in failures.items()} == {
        place.task("flaky"): 20,
        place.task("broken"): 20,
        place.task("killed"): 1,
    }
    broken = failures[place.task("broken")]
    assert broken.releases == ("7",)
    assert broken.place.endswith(f"{place.app}.py:broken")
    assert [one.release for one in place.mill.history.deploys()] == ["7"]


@pytest.mark.parametrize("public", [False, True])
def test_metrics_need_a_viewer_unless_they_are_public(place: Place, public: bool) -> None:
    auth = str(place.path / "tokens")
    token = create(auth, "prometheus", Role.VIEWER, 0.0, ())
    one_queue = create(auth, "one queue", Role.VIEWER, 0.0, ("q",))
    options = ("--public-metrics",) if public else ()
    server = JobServer("--quiet", "--auth", auth, *options, where=place.url)
    try:
        assert server.request("GET", "/metrics").status == (200 if public else 401)
        assert server.request("GET", "/v1/stats").status == 401
        server.token = one_queue
        assert server.request("GET", "/metrics").status == (200 if public else 403)
        server.token = token
        answer = server.request("GET", "/metrics")
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    finally:
        server.close()
