"""The part of the contract for protocols that number jobs (``Feature.NAMED``).

It reserves numbers, leases a job by its id, and lists the first jobs of a queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.core.job import Lease, Record, State

__all__ = ["HEAD_STATES", "JobNumbers", "with_job_numbers"]

HEAD_STATES = (State.READY, State.SCHEDULED, State.FAILED)
"""The states whose jobs are stored in an order that ``head`` can read from its beginning."""


class JobNumbers(Protocol):
    """A broker that reserves numbers, leases by id, and lists the first jobs of a queue."""

    def numbers(self, count: int) -> int:
        """Reserve ``count`` consecutive numbers, from 1 on, for the caller; return the first.

        When a lost reply is repeated, the numbers of the first call are skipped.
        """
        ...

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        """The first jobs of a queue that are ready, scheduled or failed, in order.

        The order is that of leasing, of due times, or of ends. Of the ready jobs under a limit only
        the next one of each key is listed. Carried jobs are not listed.
        """
        ...

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        """Lease ready, scheduled or failed jobs to a consumer, by id.

        A scheduled or failed job becomes ready in the same step, as ``kick`` does it. A paused
        queue or a queue's limit does not prevent the lease. None stands for a job that is carried,
        has a limit of its own, or cannot be leased.
        """
        ...


def with_job_numbers(broker: Broker, option: str) -> JobNumbers:
    """The broker with its calls for numbered jobs.

    Raises:
        FeatureMissing: the broker does not lease by id; the error names ``option``.
    """
    need(broker, Feature.NAMED, option)
    return cast(JobNumbers, broker)
