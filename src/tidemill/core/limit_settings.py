"""The settings of a limit, and the limit of a job: plain data that jobs and requests carry.

Rates, windows and breakers are tuples of numbers. Users write these tuples as text, see
:mod:`tidemill.limits.declare`. The numbers are explained in :mod:`tidemill.limits.arithmetic`.
"""

from __future__ import annotations

import msgspec

MICROSECONDS = 1_000_000


class LimitSettings(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The settings of a limit. None means no limit of that kind.

    Attributes:
        rate: (jobs, seconds): the bucket gets ``jobs`` tokens in ``seconds``. A job takes as many
            tokens as its cost. With a rate of 0 jobs, no job starts.
        burst: the most tokens in the bucket.
        window: (jobs, seconds): within any span of ``seconds`` at most ``jobs`` jobs start.
        concurrency: the most jobs that run at a time.
        breaker: (failures, seconds): after ``failures`` failed attempts in a row, no job starts for
            ``seconds``. Then jobs run one at a time until a job succeeds. After n failed attempts
            in a row, at most ``failures`` - n jobs run at a time.
    """

    rate: tuple[float, float] | None = None
    burst: float = 1.0
    window: tuple[float, float] | None = None
    concurrency: int | None = None
    breaker: tuple[int, float] | None = None

    @property
    def every(self) -> float:
        """Microseconds from one token to the next; 0 when the bucket gets no tokens."""
        return self.rate[1] * MICROSECONDS / self.rate[0] if self.rate and self.rate[0] else 0.0


class JobLimit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The limit of a job, as its envelope has it.

    Attributes:
        name: the name of the limit.
        key: the partition, such as a customer. Each key has its own count against the limit, and
            keys take turns. Empty for a limit that all jobs share.
        cost: the tokens that the job takes.
        terms: the settings that its producer declares. They apply until a producer declares other
            settings. Settings that a person sets by hand take precedence and stay.
    """

    name: str
    key: str = ""
    cost: float = 1.0
    terms: LimitSettings = LimitSettings()
