"""What an ``lmdb://`` URL asks for."""

from __future__ import annotations

import os
from typing import NamedTuple

from tidemill.brokers.lmdb.store import MAP_SIZE, PREFIX, check_prefix
from tidemill.brokers.retention import KEEP_OPTIONS, Retention, number_option
from tidemill.config import Url, check_known, storable
from tidemill.errors import InvalidOption

__all__ = ["Settings", "check_url"]

_OPTIONS = ("durability", *KEEP_OPTIONS, "map_size", "prefix")


class Settings(NamedTuple):
    """What a URL asks for."""

    folder: str
    map_size: int
    sync: bool
    prefix: str
    retention: Retention


def check_url(url: Url) -> Settings:
    """Read an ``lmdb://`` URL: ``lmdb:///absolute`` or ``lmdb://./relative``."""
    check_known("an lmdb:// url", url.options, _OPTIONS)
    if not url.path:
        raise InvalidOption(
            f"url {url.text!r} names no directory; write lmdb://./jobs or lmdb:///var/jobs"
        )
    durability = url.options.get("durability", "full")
    if durability not in ("full", "relaxed"):
        raise InvalidOption(f"durability in the url must be full or relaxed, not {durability!r}")
    map_size = int(number_option(url.options, "map_size", MAP_SIZE))
    if map_size < 1 << 20:
        raise InvalidOption(f"map_size in the url must be at least 1048576 bytes, not {map_size}")
    prefix = url.options.get("prefix", PREFIX)
    check_prefix(prefix)
    folder = os.path.abspath(os.path.expanduser(url.path))
    if storable(folder) != folder:
        raise InvalidOption(f"{folder!a} is not UTF-8, which LMDB asks of the name of a folder")
    retention = Retention.from_options(url.options)
    return Settings(folder, map_size, durability == "full", prefix, retention)
