"""The options of a ``memory://`` URL."""

from __future__ import annotations

from tidemill.brokers.contract.retention import KEEP_OPTIONS, Retention
from tidemill.core.config import Url, check_known


def check_url(url: Url) -> Retention:
    check_known("a memory:// url", url.options, KEEP_OPTIONS)
    return Retention.from_options(url.options)
