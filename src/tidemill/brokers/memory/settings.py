"""What a ``memory://`` URL asks for."""

from __future__ import annotations

from tidemill.brokers.retention import KEEP_OPTIONS, Retention
from tidemill.config import Url, check_known

__all__ = ["check_url"]


def check_url(url: Url) -> Retention:
    """Read a ``memory://`` URL."""
    check_known("a memory:// url", url.options, KEEP_OPTIONS)
    return Retention.from_options(url.options)
