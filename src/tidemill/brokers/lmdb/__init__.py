"""``lmdb://``: the default broker, one directory on disk."""

from tidemill.brokers.lmdb.broker import LmdbBroker, check_url, open_url

__all__ = ["LmdbBroker", "check_url", "open_url"]
