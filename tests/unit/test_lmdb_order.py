"""Lists of an LMDB store: by number up to some size, by id above it, and complete in both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.brokers.base import Broker, Filter, open_broker
from tidemill.brokers.lmdb import find
from tidemill.job import Envelope

IDS = ["zebra", "17", "apple", "b", "Z", "0"]


def listed(broker: Broker, cursor: str = "") -> list[str]:
    found: list[str] = []
    while True:
        page = broker.find(Filter(), 2, cursor)
        found += [record.envelope.id for record in page.records]
        cursor = page.cursor
        if not cursor:
            return found


def test_a_list_goes_on_in_the_order_in_which_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_broker(f"lmdb://{tmp_path}/store")
    broker.put([Envelope(id=each) for each in IDS])
    small = broker.find(Filter(), 2)
    assert listed(broker) == IDS[::-1]
    # when the store is larger than what is put in order
    monkeypatch.setattr(find, "ALL", 3)
    assert listed(broker) == sorted(IDS, reverse=True)
    large = broker.find(Filter(), 2)
    # then lists that began before go on as they began
    assert listed(broker, small.cursor) == IDS[-3::-1]
    monkeypatch.undo()
    assert listed(broker, large.cursor) == sorted(IDS, reverse=True)[2:]
    broker.close()


def test_a_job_that_is_put_again_meanwhile_is_not_shown_twice(tmp_path: Path) -> None:
    broker = open_broker(f"lmdb://{tmp_path}/store")
    broker.put([Envelope(id=each) for each in IDS])
    page = broker.find(Filter(), 2)
    broker.delete(["17"])
    broker.put([Envelope(id="17")])
    assert listed(broker, page.cursor) == ["b", "apple", "zebra"]
    broker.close()
