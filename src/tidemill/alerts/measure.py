"""Measure all rules at one moment, with one read of the queues and one read of the owners."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence

import msgspec

from tidemill.alerts.rules import Rule
from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.client.search import users_queues
from tidemill.core.clock import clock
from tidemill.core.job import Owner
from tidemill.core.words import counted
from tidemill.errors import FeatureMissing


class Value(msgspec.Struct, frozen=True):
    """The value of a rule for one queue, or for the store (an empty ``queue``)."""

    rule: Rule
    queue: str
    value: float
    text: str

    @property
    def is_above(self) -> bool:
        return self.value > self.rule.most


def check_measurable(mill: Tidemill, rules: Sequence[Rule]) -> None:
    """Raise FeatureMissing for rules about values that this store does not know."""
    mill.runtime.features.need(Feature.INSPECT, "a rule of alerts")
    mill.runtime.features.need(Feature.HISTORY, "an alert")
    for rule in rules:
        if rule.when == "disk" and _used(mill) is None:
            raise FeatureMissing(
                f"rule {rule.name!r}: {mill.broker.url} does not tell how full its disk is; "
                "watch the server's disk with its own tools"
            )


def measure(mill: Tidemill, rules: Sequence[Rule]) -> list[Value]:
    queues = users_queues(mill.broker.stats())
    needs_owners = any(rule.when == "no-worker" for rule in rules)
    owners = mill.broker.owners() if needs_owners else []
    found: list[Value] = []
    for rule in rules:
        rows = [row for row in queues if rule.queue in ("", row.name)]
        if rule.when == "disk":
            found += _disk(mill, rule)
        elif rule.when == "failures":
            found += _failures(mill, rule, rows)
        else:
            found += [_of_queue(rule, row, owners) for row in rows]
    return found


def _of_queue(rule: Rule, row: QueueStats, owners: Sequence[Owner]) -> Value:
    if rule.when == "depth":
        text = f"queue {row.name} has {counted(row.ready, 'ready job')}, more than {rule.most:,.0f}"
        return Value(rule, row.name, float(row.ready), text)
    if rule.when == "oldest":
        age = max(0.0, clock.wall() - row.oldest) if row.oldest and not row.paused else 0.0
        text = f"the oldest ready job of queue {row.name} is {age:.0f} s old, more than "
        return Value(rule, row.name, age, f"{text}{rule.most:g} s")
    served = any(not owner.queues or row.name in owner.queues for owner in owners)
    unserved = 0 if served or row.paused else row.ready
    text = f"queue {row.name} has {counted(row.ready, 'ready job')} and no worker"
    return Value(rule, row.name, float(unserved), text)


def _failures(mill: Tidemill, rule: Rule, rows: Sequence[QueueStats]) -> Iterator[Value]:
    names = {row.name for row in rows}
    for queue in mill.history.queues(rule.within):
        if queue.queue not in names:
            continue
        failed = sum(point.failed for point in queue.points)
        ended = failed + sum(point.succeeded for point in queue.points)
        part = failed / ended if ended and ended >= rule.at_least else 0.0
        text = f"{part:.1%} of {ended:,} jobs of queue {queue.queue} failed within "
        yield Value(rule, queue.queue, part, f"{text}{rule.within:g} s, more than {rule.most:.1%}")


def _disk(mill: Tidemill, rule: Rule) -> Iterator[Value]:
    used = _used(mill)
    if used is not None:
        part, place = used
        text = f"{place} is {part:.0%} full, more than {rule.most:.0%}"
        yield Value(rule, "", part, text)


def _used(mill: Tidemill) -> tuple[float, str] | None:
    """The used part of the store's disk or of its server's memory, and the name of that place."""
    info = mill.broker.info()
    folder = info.get("folder")
    if folder and os.path.isdir(folder):
        disk = shutil.disk_usage(folder)
        return 1 - disk.free / disk.total, f"the disk of {folder}"
    if info.get("maxmemory_bytes"):
        return info["memory_bytes"] / info["maxmemory_bytes"], f"the memory of {mill.broker.url}"
    return None if "maxmemory_bytes" not in info else (0.0, "the memory")
