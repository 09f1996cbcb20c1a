"""The backoff of retries: the policy that a job stores, and the delay before each attempt.

Backoff is exponential with full jitter: each delay is drawn evenly from 0 to a growing bound. So
jobs that failed together do not come back together (M. Brooker, "Exponential Backoff and Jitter",
2015).
"""

from __future__ import annotations

import random

import msgspec


class RetryPolicy(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The number and the times of a failed job's retries, as a job stores them.

    Attributes:
        limit: retries after the first attempt; ``Retries(0)`` never retries.
        delay: the first bound in seconds: full jitter draws the delay from 0 to the bound.
        factor: each retry multiplies the bound by this.
        cap: the largest bound in seconds.
        jitter: False waits the full bound instead of drawing from it.
        immediate: the first ``immediate`` retries have no delay; the backoff begins after them.
    """

    limit: int = 3
    delay: float = 5.0
    factor: float = 2.0
    cap: float = 3600.0
    jitter: bool = True
    immediate: int = 0

    @property
    def max_attempts(self) -> int:
        """The most attempts at the job; 0 means no limit."""
        return self.limit + 1


ENDLESS = RetryPolicy(limit=-1)
"""The policy of beanstalk jobs: retries without limit and without delay, as in the protocol."""


MESSAGE = RetryPolicy(limit=19, delay=1.0, factor=2.0, cap=300.0, jitter=False, immediate=1)
"""The policy of a message put without ``retries``.

After the first failed delivery, the message returns to its place in the line. The delays after
later failures double from 1 s to 5 minutes. The 20th failure ends the message.
"""


BY_POLICY = -1.0
"""The delay of a verdict that leaves the delay to the job's policy, also for tasks."""


def backoff(policy: RetryPolicy, attempt: int) -> float:
    """Seconds until a job runs again after the failure of its attempt ``attempt``, from 1.

    Redis and PostgreSQL compute the same numbers: ``backoff.lua`` and ``29_backoff.sql``.
    """
    step = attempt - 1 - policy.immediate
    if policy.limit < 0 or policy.delay <= 0 or step < 0:
        return 0.0
    # The exponent ends at 64, because 2.0 ** 1024 overflows. No useful cap is reached later.
    bound = min(policy.cap, policy.delay * policy.factor ** min(step, 64))
    return random.uniform(0.0, bound) if policy.jitter else bound
