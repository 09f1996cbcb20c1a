"""Opening an ``lmdb://`` URL, to use the store or only to read it; the settings in the URL."""

from __future__ import annotations

import os
from typing import NamedTuple

from tidemill.brokers.contract.retention import KEEP_OPTIONS, Retention, number_option
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine.environment import check_prefix
from tidemill.brokers.lmdb.engine.group_commit import PATIENCE
from tidemill.brokers.lmdb.engine.store import MAP_SIZE, PREFIX, open_store
from tidemill.core.config import Url, check_known, storable
from tidemill.errors import BrokerUnavailable, InvalidOption


def open_url(url: Url) -> LmdbBroker:
    """The broker of an ``lmdb://`` URL; its store is made when it is missing."""
    return _open(url, reading=False)


def read_url(url: Url) -> LmdbBroker:
    """Open the store for reading: this makes no file, changes no job and wakes no worker."""
    return _open(url, reading=True)


def _open(url: Url, *, reading: bool) -> LmdbBroker:
    asked = check_url(url)
    try:
        store = open_store(asked, reading=reading)
    except OSError as error:
        raise BrokerUnavailable(
            f"cannot use {asked.folder} as a store: {error.strerror}; name a folder that this user "
            "may write"
        ) from error
    return LmdbBroker(url.text, store, asked.retention, reading=reading)


_OPTIONS = ("durability", *KEEP_OPTIONS, "map_size", "mode", "patience", "prefix")


class Settings(NamedTuple):
    """The settings in a URL."""

    # ``mode`` is the mode of new files, 0 for the mode that the folder gives. ``patience``: seconds
    # that callers wait for the write lock.

    folder: str
    map_size: int
    sync: bool
    prefix: str
    retention: Retention
    mode: int
    patience: float


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
        raise InvalidOption(f"{folder!a} is not UTF-8: LMDB needs a UTF-8 folder name")
    retention = Retention.from_options(url.options)
    mode = _mode(url.options.get("mode", ""))
    patience = number_option(url.options, "patience", PATIENCE)
    sync = durability == "full"
    return Settings(folder, map_size, sync, prefix, retention, mode, patience)


def _mode(text: str) -> int:
    """The mode of new files; 0 means the mode that the folder gives."""
    if not text:
        return 0
    mode = int(text, 8) if set(text) <= set("01234567") and len(text) <= 4 else 0
    shares = (mode >> 6, mode >> 3 & 7, mode & 7)
    if shares[0] != 6 or any(share not in (0, 6) for share in shares):
        raise InvalidOption(
            f"mode in the url must be 0600, 0660 or 0666, not {text!r}: "
            "every user of a store reads and writes its files"
        )
    return mode
