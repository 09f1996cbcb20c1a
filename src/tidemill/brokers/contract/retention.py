"""The retention of finished jobs, from the options of a URL, the same on every broker."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidemill.errors import InvalidOption

KEEP_OPTIONS = ("keep", "keep_count", "keep_failed")


class Retention(msgspec.Struct, frozen=True):
    """The retention of finished jobs: by time, and for succeeded jobs also by number.

    When more than ``count`` succeeded jobs are kept, the store first deletes jobs without a result.
    Then it deletes the jobs with the oldest results. It keeps a result other than None for at least
    ``protect`` seconds, so that the caller can fetch it. A shorter ``result_ttl`` of the job itself
    takes precedence over ``protect``. On LMDB and Redis, results of jobs with different times of
    keeping are deleted in about this order.
    """

    succeeded: float = 3600.0
    count: int = 100_000
    failed: float = 30 * 86400.0
    protect: float = 60.0

    def of_success(self, result_ttl: float, has_result: bool) -> float:
        """The seconds for which a succeeded job is kept; a negative ``result_ttl`` is unset."""
        if result_ttl >= 0:
            return result_ttl
        return max(self.succeeded, self.protect) if has_result else self.succeeded

    def first_look(self, result_ttl: float) -> float:
        """The seconds from the end of a job of a flow to the first look whether it is needed."""
        return min(result_ttl, self.protect) if result_ttl >= 0 else self.protect

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Retention:
        """The retention by the options ``keep``, ``keep_count`` and ``keep_failed`` of a URL."""
        default = cls()
        return cls(
            succeeded=number_option(options, "keep", default.succeeded),
            count=int(number_option(options, "keep_count", default.count)),
            failed=number_option(options, "keep_failed", default.failed),
        )


def number_option(options: Mapping[str, str], name: str, default: float) -> float:
    """The value of a URL option, which must be a number of 0 or more."""
    text = options.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidOption(f"{name} in the url must be a number of 0 or more, not {text!r}")
    return value
