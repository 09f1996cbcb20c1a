"""Metrics of an app's store: which there are, how they look as text, and which a broker lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tidemill import Tidemill
from tidemill.metrics import Collector, Family, Sample, exposition
from tidemill.testing import run_all

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill("memory://")


def values(mill_or_collector: Tidemill | Collector) -> Values:
    """What a reader of the text finds."""
    collector = mill_or_collector
    if isinstance(collector, Tidemill):
        collector = Collector(collector)
    return parsed(exposition(collector.families()))


def parsed(text: bytes) -> Values:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def labels(**given: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(given.items()))


def test_queues_tasks_and_workers_have_metrics(mill: Tidemill) -> None:
    @mill.task(name="well", queue="q")
    def well() -> None: ...

    @mill.task(name="ill", queue="q", retries=0)
    def ill() -> None:
        raise ValueError

    well.using(delay=1000).enqueue()
    mill.enqueue_many([*[well.call() for _ in range(5)], ill.call()])
    run_all(mill)
    well.enqueue()
    found = values(mill)
    queue = labels(queue="q")
    assert found["tidemill_queue_jobs", labels(queue="q", state="ready")] == 1
    assert found["tidemill_queue_jobs", labels(queue="q", state="scheduled")] == 1
    assert found["tidemill_queue_accepted_total", queue] == 8
    assert found["tidemill_queue_succeeded_total", queue] == 5
    assert found["tidemill_queue_failed_total", queue] == 1
    assert found["tidemill_queue_oldest_ready_seconds", queue] >= 0
    assert found["tidemill_queue_paused", queue] == 0
    assert found["tidemill_workers", ()] == found["tidemill_slots", ()] == 0
    of = {"queue": "q", "task": "well"}
    assert found["tidemill_task_runs_total", labels(**of, outcome="succeeded")] == 5
    assert found["tidemill_task_run_seconds_count", labels(**of)] == 5
    assert found["tidemill_task_wait_seconds_bucket", labels(**of, le="+Inf")] == 5
    with mill.worker(3):
        assert values(mill)["tidemill_slots", ()] == 3


def test_buckets_are_cumulative_and_end_with_all_times(mill: Tidemill) -> None:
    @mill.task(name="t")
    def task() -> None: ...

    mill.enqueue_many([task.call() for _ in range(7)])
    run_all(mill)
    (run,) = [one for one in Collector(mill).families() if one.name == "tidemill_task_run_seconds"]
    buckets = [sample.value for sample in run.samples if sample.suffix == "_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 7


def test_text_and_collector_say_the_same(mill: Tidemill) -> None:
    @mill.task(name="t", queue='odd "name" \\ here')
    def task() -> None: ...

    task.enqueue()
    run_all(mill)
    collector, registry = Collector(mill), CollectorRegistry()
    registry.register(collector)
    assert parsed(generate_latest(registry)) == parsed(exposition(collector.families()))
    assert ("tidemill_queue_paused", labels(queue='odd "name" \\ here')) in values(mill)


def test_labels_are_escaped_and_numbers_are_exact() -> None:
    samples = [Sample("_total", (("a", 'x"\\\n'),), 2.0**53), Sample("_total", (), 0.25)]
    assert exposition([Family("n", "counter", "What it is.", samples)]) == (
        b"# HELP n_total What it is.\n"
        b"# TYPE n_total counter\n"
        b'n_total{a="x\\"\\\\\\n"} 9007199254740992\n'
        b"n_total 0.25\n"
    )


def test_the_dashboard_of_grafana_uses_metrics_that_exist(mill: Tidemill) -> None:
    @mill.task(name="t")
    def task() -> None: ...

    task.enqueue()
    run_all(mill)
    file = Path(__file__).parents[2] / "examples" / "grafana" / "tidemill.json"
    asked = set(re.findall(r"tidemill_[a-z_]+", json.dumps(json.loads(file.read_text())["panels"])))
    there = {name for name, _ in values(mill)} | {"tidemill_store_bytes"}  # memory has no sizes
    assert asked
    assert asked <= there
