"""``postgresql://``: jobs in the database you have already, and in your own transactions.

The statements are in ``sql/``: the tables under ``migrations/``, and beside them the functions, one
file an idea, in the order of a job's life. A call of the seam is one statement, so that it is one
round trip and one step; Python packs what goes in, unpacks what comes out, sleeps and listens.
"""

from tidemill.brokers.postgres.address import check_url
from tidemill.brokers.postgres.broker import PostgresBroker, grants_url, migrate_url, open_url

__all__ = ["PostgresBroker", "check_url", "grants_url", "migrate_url", "open_url"]
