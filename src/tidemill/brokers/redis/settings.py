"""The settings of the store in a ``redis://`` URL, with the address of its server."""

from __future__ import annotations

import re

import msgspec

from tidemill.brokers.redis.address import Address, parse_address, prefix_of
from tidemill.core.config import Url
from tidemill.core.errors import InvalidOption
from tidemill.core.retention import Retention, number_option


class Settings(msgspec.Struct, frozen=True):
    """The settings in a URL."""

    address: Address
    prefix: str
    retention: Retention
    patience: float
    owner_lease: float
    replicas: int


def check_url(url: Url) -> Settings:
    """Read a ``redis://`` or ``redis+sentinel://`` URL, or one of these with TLS.

    Raises:
        InvalidOption: a part of the URL is wrong.
    """
    lease = number_option(url.options, "owner_lease", 30.0)
    if not 1 <= lease <= 86400:
        raise InvalidOption(f"owner_lease in the url must be 1 to 86400 seconds, not {lease:g}")
    return Settings(
        parse_address(url),
        prefix_of(url),
        Retention.from_options(url.options),
        number_option(url.options, "patience", 10.0),
        lease,
        _replicas(url.options.get("replicas", "0")),
    )


def _replicas(text: str) -> int:
    """The number of replicas that must have a job before the job counts as accepted."""
    if not re.fullmatch(r"\d{1,2}", text):
        raise InvalidOption(f"replicas in the url must be a number from 0 to 99, not {text!r}")
    return int(text)
