"""Metrics for Prometheus: of the queues, the tasks, the workers and the store.

``tidemill server`` serves them at ``/metrics``. A program with ``prometheus_client`` registers a
collector, which reads the store at each scrape::

    from prometheus_client import REGISTRY
    from tidemill.metrics import Collector

    REGISTRY.register(Collector(mill))

Each number is about the whole store, so scrape one process, not each worker. Counters count from
the creation of the store or of its history. They survive restarts of every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill import Tidemill, __version__
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history_rows import QUEUE_STATES, QUEUE_TOTALS
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.client.history import TaskNumbers, Times
from tidemill.core.clock import clock

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of :func:`exposition`."""

_ENDS = ("succeeded", "failed", "retried", "cancelled", "given_back")
_LAST = 22
"""The last bucket with a bound: times below 2 ** 22 ms (70 minutes). Later buckets are merged."""

_BOUNDS = [repr(2.0**n / 1000) for n in range(_LAST + 1)]
"""The upper bounds of the buckets in seconds, as labels."""

Labels = tuple[tuple[str, str], ...]


class Sample(msgspec.Struct, frozen=True):
    """One number of a family. ``suffix``, such as ``_total``, follows the family's name."""

    suffix: str
    labels: Labels
    value: float


class Family(msgspec.Struct, frozen=True):
    """A metric: its name, its type, its help text and all its samples.

    Attributes:
        name: the name, without the ``_total`` of a counter.
        kind: ``gauge``, ``counter`` or ``histogram``.
        help: one line.
        samples: the numbers.
    """

    name: str
    kind: str
    help: str
    samples: list[Sample]


class Collector:
    """Reads the metrics of an app's store; a collector for ``prometheus_client``."""

    def __init__(self, mill: Tidemill) -> None:
        self._mill = mill

    def families(self) -> list[Family]:
        """The metrics as they are now.

        Raises:
            BrokerUnavailable: the store cannot be reached.
        """
        return [family for family in _families(self._mill) if family.samples]

    def collect(self) -> Iterator[Metric]:
        """The metrics for a registry of ``prometheus_client``."""
        from prometheus_client.core import Metric

        for family in self.families():
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                name = family.name + sample.suffix
                metric.add_sample(name, dict(sample.labels), sample.value)
            yield metric

    def describe(self) -> list[Metric]:
        """No metrics. Without this method, a registry would read the store to learn the names."""
        return []


def exposition(families: Iterable[Family]) -> bytes:
    """The metrics in the text format of Prometheus, version 0.0.4."""
    lines: list[str] = []
    for family in families:
        name = family.name + ("_total" if family.kind == "counter" else "")
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for sample in family.samples:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels)
            shown = f"{{{labels}}}" if labels else ""
            lines.append(f"{family.name}{sample.suffix}{shown} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


# -- reading the store ----------------------------------------------------------------------------


def _families(mill: Tidemill) -> Iterator[Family]:
    broker = mill.broker
    yield _gauge("tidemill_info", "The version of tidemill.", {(("version", __version__),): 1})
    yield from _queues(mill.queues())
    if Feature.INSPECT in broker.features:
        yield from _workers(mill)
    sizes = {
        (("what", name.removesuffix("_bytes")),): float(value)
        for name, value in broker.info().items()
        if name.endswith("_bytes") and isinstance(value, int | float)
    }
    yield _gauge("tidemill_store_bytes", "Sizes of the store, as tidemill info shows them.", sizes)
    if Feature.HISTORY in broker.features:
        yield from _tasks(mill.history.totals())


def _gauge(name: str, text: str, values: Mapping[Any, float]) -> Family:
    samples = [Sample("", labels, float(value)) for labels, value in values.items()]
    return Family(name, "gauge", text, samples)


def _queues(rows: list[QueueStats]) -> Iterator[Family]:
    def known(name: str) -> list[QueueStats]:
        return [row for row in rows if name not in row.unknown]

    states = {
        (("queue", row.name), ("state", state)): float(getattr(row, state))
        for state in QUEUE_STATES
        for row in known(state)
    }
    yield _gauge("tidemill_queue_jobs", "Jobs in the queue, by state.", states)
    now = clock.wall()
    ages = {
        (("queue", row.name),): round(max(0.0, now - row.oldest), 3) if row.oldest else 0.0
        for row in known("oldest")
    }
    text = "Age of the ready job that was accepted first; 0 when no job is ready."
    yield _gauge("tidemill_queue_oldest_ready_seconds", text, ages)
    paused = {(("queue", row.name),): float(row.paused) for row in rows}
    yield _gauge("tidemill_queue_paused", "1 when the queue is paused.", paused)
    for total in QUEUE_TOTALS:
        samples = [
            Sample("_total", (("queue", row.name),), float(getattr(row, total)))
            for row in known(total)
        ]
        text = _HELP[total]
        yield Family(f"tidemill_queue_{total}", "counter", text, samples)


_HELP = {
    "accepted": "Jobs that were put.",
    "succeeded": "Jobs that succeeded.",
    "failed": "Jobs that failed for good.",
    "retried": "Failed attempts that another attempt followed.",
    "cancelled": "Jobs that were cancelled.",
    "expired": "Jobs that did not start in time.",
    "purged": "Jobs that purges took out.",
}


def _workers(mill: Tidemill) -> Iterator[Family]:
    owners = mill.broker.owners()
    workers = [owner for owner in owners if owner.kind == "worker"]
    yield _gauge("tidemill_workers", "Workers that are attached.", {(): len(workers)})
    slots = sum(worker.concurrency for worker in workers)
    yield _gauge("tidemill_slots", "Jobs that all workers can run at a time.", {(): slots})


def _tasks(rows: list[TaskNumbers]) -> Iterator[Family]:
    runs = [
        Sample("_total", (*_of(row), ("outcome", end)), float(getattr(row, end)))
        for row in rows
        for end in _ENDS
    ]
    yield Family("tidemill_task_runs", "counter", "Runs by workers, by their outcome.", runs)
    text = "Time from when a job was due to the start of its first attempt."
    yield _histogram("tidemill_task_wait_seconds", text, [(_of(row), row.wait) for row in rows])
    text = "Time that attempts ran."
    yield _histogram("tidemill_task_run_seconds", text, [(_of(row), row.run) for row in rows])


def _of(row: TaskNumbers) -> Labels:
    return ("queue", row.queue), ("task", row.task)


def _histogram(name: str, text: str, rows: list[tuple[Labels, Times]]) -> Family:
    """The times of tasks. Each bound counts all times below it."""
    samples: list[Sample] = []
    for labels, times in rows:
        below = 0
        for bound, count in zip(_BOUNDS, times.buckets, strict=False):
            below += count
            samples.append(Sample("_bucket", (*labels, ("le", bound)), float(below)))
        samples.append(Sample("_bucket", (*labels, ("le", "+Inf")), float(times.count)))
        samples.append(Sample("_sum", labels, times.sum))
        samples.append(Sample("_count", labels, float(times.count)))
    return Family(name, "histogram", text, samples)
