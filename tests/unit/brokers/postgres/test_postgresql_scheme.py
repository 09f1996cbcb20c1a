"""``postgres://`` names a store as ``postgresql://`` does."""

from __future__ import annotations

from servers import NETWORK

from tidemill import Tidemill
from tidemill.core.clock import new_id


def test_a_url_with_the_short_scheme_opens_the_same_store() -> None:
    # given a store with a message
    url = NETWORK["postgresql"](f"t{new_id()}")
    with Tidemill(url) as mill:
        message = mill.queue("orders").put("x")
        # then the other scheme shows it
        with Tidemill(url.replace("postgresql://", "postgres://")) as other:
            assert other.job(message.id).state == "ready"
            assert other.broker.url == mill.broker.url
