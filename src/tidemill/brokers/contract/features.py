"""The features that a broker may have, and the refusal of an option whose feature is missing."""

from __future__ import annotations

import enum
from typing import Protocol

from tidemill.errors import FeatureMissing


class Feature(enum.StrEnum):
    """A capability of a broker beyond put, lease and settle."""

    DURABLE = "durable"  # stored jobs survive kill -9 of every process
    PROCESSES = "processes"  # several processes may share the broker
    IDS = "ids"  # a caller may choose the id of a job; each id is taken once
    DELAY = "delay"
    PRIORITY = "priority"
    KEYS = "keys"
    UNIQUE = "unique"  # options of ``Unique``: ``period`` and ``max_wait``
    RESULTS = "results"
    INSPECT = "inspect"
    FAILED = "failed"  # failed jobs, at least, can be listed, retried and deleted
    CANCEL = "cancel"
    ALTER = "alter"  # a job that has not started can get another priority or queue
    PAUSE = "pause"
    MAX_SIZE = "max_size"
    MERGED = "merged"  # Mode.MERGED: one order across queues
    TRANSACTIONS = "transactions"  # txn=
    BACKUP = "backup"
    FLOWS = "flows"  # jobs that wait for other jobs: chains, groups, callbacks
    MOVE = "move"  # all jobs can move to another store, or arrive from another store
    SCHEDULES = "schedules"  # schedules, each of which fires exactly once for each due time
    LIMITS = "limits"  # rates, windows, concurrency and breakers, of queues and of keys
    NAMED = "named"  # a job can be leased by its id; the first jobs of a state can be listed
    TOPICS = "topics"  # queues bound to patterns; one publish puts a copy into each
    HISTORY = "history"  # rows of numbers by period, which workers add to
    REMOTE_OWNERS = "elsewhere"  # owners that reach the store through a job server (``http://``)


class _Featured(Protocol):
    url: str
    features: frozenset[Feature]


def need(broker: _Featured, feature: Feature, option: str) -> None:
    """Raise FeatureMissing, which names option and feature, if the broker lacks the feature."""
    if feature not in broker.features:
        raise lacks(broker.url, feature, option)


def lacks(url: str, feature: Feature, option: str) -> FeatureMissing:
    """The error for an option whose feature the broker of a URL lacks."""
    scheme = url.split("://", 1)[0]
    return FeatureMissing(
        f"{option} needs the feature {feature!s}, which {scheme}:// does not have"
    )
