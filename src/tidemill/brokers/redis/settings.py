"""What a ``redis://`` URL says of the store, besides where its server is."""

from __future__ import annotations

import msgspec

from tidemill.brokers.redis.address import Address, parse_address, prefix_of
from tidemill.brokers.retention import Retention, number_option
from tidemill.config import Url
from tidemill.errors import InvalidOption

__all__ = ["Settings", "check_url"]


class Settings(msgspec.Struct, frozen=True):
    """What a URL says."""

    address: Address
    prefix: str
    retention: Retention
    patience: float
    owner_lease: float


def check_url(url: Url) -> Settings:
    """Read a ``redis://``, ``rediss://`` or ``redis+sentinel://`` URL.

    Raises:
        InvalidOption: something in it is wrong.
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
    )
