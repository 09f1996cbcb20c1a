"""The features that a broker may have, and the refusal of an option whose feature is missing."""

from __future__ import annotations

import enum
from typing import Protocol

from tidemill.core.errors import FeatureMissing

__all__ = ["Feature", "lacks", "need"]


class Feature(enum.StrEnum):
    """A capability of a broker beyond put, lease and settle."""

    DURABLE = "durable"  # jobs survive kill -9 of every process
    PROCESSES = "processes"  # several processes may share the broker
    IDS = "ids"  # a caller may choose the id of a job; each id is taken once
    DELAY = "delay"
    PRIORITY = "priority"
    KEYS = "keys"
    UNIQUE = "unique"  # a succeeded job keeps its key for a period; replacing has a time limit
    RESULTS = "results"
    INSPECT = "inspect"
    FAILED = "failed"  # failed jobs can be listed, kicked and deleted, if no others can
    CANCEL = "cancel"
    PAUSE = "pause"
    MAX_SIZE = "max_size"
    MERGED = "merged"  # Mode.MERGED: one order across queues
    TRANSACTIONS = "transactions"  # txn=
    BACKUP = "backup"
    FLOWS = "flows"  # jobs that wait for others: chains, groups, callbacks
    MOVE = "move"  # all jobs can move to another store, or arrive from one
    DRAIN = "drain"  # the broker only carries jobs; they can be taken out of it into a store
    SCHEDULES = "schedules"  # records that come due and fire exactly once
    LIMITS = "limits"  # rates, windows, concurrency and breakers, of queues and of keys
    CARRY = "carry"  # leases may lie with a carrier, which brings them to workers
    NAMED = "named"  # a job can be leased by its id, and the first jobs of a state be listed
    UNKNOWN = "unknown"  # jobs of tasks that no worker knows wait aside for a worker that does
    REMOTE_OWNERS = "elsewhere"  # owners with a lease, serials and nonces: served over HTTP


class _Featured(Protocol):
    url: str
    features: frozenset[Feature]


def need(broker: _Featured, feature: Feature, option: str) -> None:
    """Refuse an option whose feature the broker lacks, naming both.

    Raises:
        FeatureMissing: the broker lacks the feature.
    """
    if feature not in broker.features:
        raise lacks(broker.url, feature, option)


def lacks(url: str, feature: Feature, option: str) -> FeatureMissing:
    """The error for an option whose feature the broker of a URL lacks."""
    scheme = url.split("://", 1)[0]
    return FeatureMissing(
        f"{option} needs the feature {feature!s}, which {scheme}:// does not have"
    )
