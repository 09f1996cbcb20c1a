"""``postgresql://``: jobs in the app's own database, and in the app's transactions.

The SQL is in ``sql/``: the tables under ``migrations/``, and the functions in one file for each
topic, in the order of a job's life. A call of the contract is one statement, so it is one round
trip and atomic. Python packs the arguments, unpacks the answers, sleeps and listens.
"""

from tidemill.brokers.postgres.broker import PostgresBroker, grants_url, migrate_url, open_url
from tidemill.brokers.postgres.settings import check_url

__all__ = ["PostgresBroker", "check_url", "grants_url", "migrate_url", "open_url"]
