"""Opening an ``lmdb://`` URL, to use the store or only to read it."""

from __future__ import annotations

from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.settings import check_url
from tidemill.brokers.lmdb.store import open_store
from tidemill.core.config import Url
from tidemill.core.errors import BrokerUnavailable


def open_url(url: Url) -> LmdbBroker:
    """The broker of an ``lmdb://`` URL; its store is made when it is missing."""
    return _open(url, reading=False)


def read_url(url: Url) -> LmdbBroker:
    """Open the store for reading: this makes no file, changes no job and wakes no worker."""
    return _open(url, reading=True)


def _open(url: Url, *, reading: bool) -> LmdbBroker:
    asked = check_url(url)
    try:
        store = open_store(
            asked.folder,
            map_size=asked.map_size,
            sync=asked.sync,
            prefix=asked.prefix,
            mode=asked.mode,
            patience=asked.patience,
            reading=reading,
        )
    except OSError as error:
        raise BrokerUnavailable(
            f"cannot use {asked.folder} as a store: {error.strerror}; name a folder that this user "
            "may write"
        ) from error
    return LmdbBroker(url.text, store, asked.retention, reading=reading)
