"""``lmdb://``: the default broker, one directory on disk."""

from tidemill.brokers.lmdb.broker import LmdbBroker, open_url

__all__ = ["LmdbBroker", "open_url"]
