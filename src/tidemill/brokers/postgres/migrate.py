"""Making or changing the tables of a store while others use them.

A migration locks its tables. While a migration waits for a transaction that uses a table, all later
users of the table wait for the migration. So the migration waits half a second at most, lets other
users through, and tries again while its patience lasts.
"""

from __future__ import annotations

import random
import time

import psycopg

from tidemill.brokers.postgres.errors import Refused, Unfit, is_worth_repeating, translated
from tidemill.brokers.postgres.schema import migrate
from tidemill.brokers.postgres.settings import Address
from tidemill.brokers.postgres.timed_connection import connect
from tidemill.errors import BrokerUnavailable

_PAUSE = 0.5


def bring_up(address: Address) -> tuple[int, int]:
    """Bring a store to this version; return the versions before and after."""
    until = time.monotonic() + address.limit
    while True:
        try:
            return _try(address)
        except (Refused, Unfit):
            raise
        except BrokerUnavailable:
            if time.monotonic() + _PAUSE >= until:
                raise
        time.sleep(_PAUSE * random.uniform(0.5, 1.0))


def _try(address: Address) -> tuple[int, int]:
    conn = connect(address, direct=True)
    conn.until = None  # a migration takes its time
    try:
        return migrate(conn, address.schema)
    except psycopg.errors.LockNotAvailable as error:
        raise BrokerUnavailable(_in_use(address)) from error
    except psycopg.Error as error:
        if is_worth_repeating(error):
            raise BrokerUnavailable(_in_use(address)) from error
        raise translated(error, address.where) from error
    finally:
        conn.close()


def _in_use(address: Address) -> str:
    return (
        f"the store in schema {address.schema!r} at {address.where} could not be migrated within "
        f"{address.limit:g} s: another migration is under way, or a transaction that stays open "
        "uses its tables (pg_stat_activity shows it); end the transaction, or raise patience= in "
        "the url, then run it again"
    )
