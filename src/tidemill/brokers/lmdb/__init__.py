"""``lmdb://``: the default broker, in one directory on disk."""

from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.open import check_url, open_url, read_url

__all__ = ["LmdbBroker", "check_url", "open_url", "read_url"]
