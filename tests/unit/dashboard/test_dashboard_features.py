"""The pages on brokers that lack something: they show what they can, and say what is missing."""

from __future__ import annotations

import re

import pytest
from dashboard_desk import Visitor, words

from tidemill import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.dashboard.formats import NOTHING
from tidemill.errors import BrokerUnavailable

PAGES = ("/", "/queues", "/queues/mail", "/workers", "/audit", "/settings", "/help")


@pytest.fixture
def mill(monkeypatch: pytest.MonkeyPatch) -> Tidemill:
    """A broker that counts ready jobs and consumers, and knows nothing else."""
    mill = Tidemill("memory://")
    features = frozenset({Feature.DURABLE, Feature.PROCESSES, Feature.DELAY})
    monkeypatch.setattr(mill.broker, "features", features)
    rows = [QueueStats(name="mail", ready=12, consumers=2)]
    monkeypatch.setattr(mill.broker, "stats", lambda: rows)

    def refuse(*_: object) -> None:
        raise AssertionError("a page asked for what the broker lacks")

    for call in ("owners", "find", "history", "limits"):
        monkeypatch.setattr(mill.broker, call, refuse)
    return mill


@pytest.mark.parametrize("path", PAGES)
def test_each_page_opens_on_a_broker_with_few_features(mill: Tidemill, path: str) -> None:
    assert "Something broke" not in Visitor(mill).get(path)


def test_unknown_numbers_are_a_dash_and_no_link(mill: Tidemill) -> None:
    anna = Visitor(mill)
    assert f"mail 12 {NOTHING} {NOTHING} 0 {NOTHING} 2" in words(anna.get("/queues"))
    assert "/jobs?q=" not in anna.get("/queues")


def test_missing_features_are_named_on_each_page(mill: Tidemill) -> None:
    anna = Visitor(mill)
    overview = words(anna.get("/"))
    assert "This broker keeps no history: rates, times and failures are missing here." in overview
    assert "It cannot look into its queues either" in overview
    assert "This broker has no list of workers" in words(anna.get("/workers"))
    assert "This broker keeps no audit list" in words(anna.get("/audit"))
    settings = words(anna.get("/settings"))
    assert "inspect search, counts by state, list of workers (missing)" in settings


def test_actions_that_the_broker_lacks_have_no_button(mill: Tidemill) -> None:
    text = Visitor(mill).get("/queues/mail")
    assert re.findall(r'action="([^"]*)"', text.partition("<main")[2]) == ["/queues/mail/purge"]


def test_a_store_that_is_away_is_a_page_that_says_so(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise BrokerUnavailable("cannot reach redis://db: connection refused")

    monkeypatch.setattr(mill.broker, "stats", away)
    text = words(Visitor(mill).get("/", 503))
    assert "The store cannot be reached cannot reach redis://db: connection refused" in text


def test_a_fault_of_a_page_is_a_page_and_a_log_line(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mill.broker, "stats", lambda: 1 / 0)
    assert "ZeroDivisionError" not in Visitor(mill).get("/queues", 500)
    assert "GET /queues failed" in caplog.text
