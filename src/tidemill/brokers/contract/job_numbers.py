"""Broker calls for wire protocols that name jobs by number, such as beanstalk (``Feature.NAMED``).

The calls reserve numbers, lease a job by its id, and list the first jobs of a queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.core.job import Lease, Record, State


class JobNumbers(Protocol):
    """A broker that reserves numbers, leases by id, and lists the first jobs of a queue."""

    def numbers(self, count: int) -> int:
        """Reserve ``count`` consecutive numbers for the caller; return the first of these.

        The store's first number is 1. When the caller repeats the call after a lost reply, the
        numbers of the first call stay unused.
        """
        ...

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        """The first jobs of a queue that are ready, scheduled or failed, in order.

        Ready jobs are in the order of leasing, scheduled jobs by due time, failed jobs by the time
        of their end. Of the ready jobs under a limit, a broker may list only the next job of each
        key. The records are ``listed``.
        """
        ...

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        """Lease ready, scheduled or failed jobs to a consumer, by id.

        A scheduled or failed job becomes ready in the same step, as by ``retry``. A paused queue or
        a queue's limit does not prevent the lease. None stands for a job that has a limit of its
        own, or cannot be leased.
        """
        ...


def with_job_numbers(broker: Broker, option: str) -> JobNumbers:
    """The broker with its calls for numbered jobs. Raises FeatureMissing for ``option``."""
    need(broker, Feature.NAMED, option)
    return cast(JobNumbers, broker)
