"""Fixtures of the conformance suite; the brokers it runs on are listed in ``kinds.py``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from broker_driver import LiveOwner, Settled, check_counts
from kinds import KINDS, STILL, Clock, Kind
from servers import forget_served
from test_contract_features import FEATURES

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.registry import open_broker
from tidemill.core.errors import FeatureMissing


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*what): features, or promises of Kind.cannot")
    config.addinivalue_line("markers", "still_clock: only ``advance`` moves the broker's clocks on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a carrier run the tests of a job's way; the store itself proves the rest.

    Transfer tests run only between the carrier and its store.
    """

    def is_left_out(item: pytest.Item) -> bool:
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        kinds = [each for each in params if isinstance(each, Kind)]
        carriers = sum(bool(kind.carrier) for kind in kinds)
        others = any(not kind.carrier and kind.name != "lmdb" for kind in kinds)
        return carriers > 0 and (item.path.stem not in CARRIED or others or carriers > 1)

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_left_out(item)]


CARRIED = {
    f"test_contract_{name}"
    for name in (
        *("admin", "features", "workflows", "retention", "keys", "leases", "limits", "transfer"),
        *("job_numbers", "messages", "put", "schedules", "leases_alone", "unique", "unknown_tasks"),
        *("alter", "limit_holds", "topics", "history", "history_move", "purges"),
    )
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    kind = getattr(item, "callspec", None) and item.callspec.params.get("kind")
    for mark in item.iter_markers("needs"):
        for what in mark.args:
            has = what in FEATURES[kind.name] if isinstance(what, Feature) else True
            if not has or what in kind.cannot:
                pytest.skip(f"{kind.name} has no {what}" if not has else f"not by it: {what}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip a test that needs a missing feature, naming the feature.

    test_contract_features.py freezes the features of each broker.
    """
    try:
        return (yield)
    except FeatureMissing as error:
        kind, missing = item.funcargs.get("kind"), _NEEDED.search(str(error))
        if missing is None or Feature(missing[1]) in FEATURES[kind.name]:
            raise
        pytest.skip(f"{kind.name} has no {missing[1]}")


_NEEDED = re.compile(r" needs the feature (\w+), which ")


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def clock(request: pytest.FixtureRequest, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the broker. In a test with the mark ``still_clock`` a slow machine costs no time
    of the broker."""
    is_still = request.node.get_closest_marker("still_clock") is not None
    return Clock(kind, monkeypatch, STILL if is_still else 1.0)


@pytest.fixture
def open_store(kind: Kind, tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Open brokers, with options for the URL; check their counters at the end."""
    opened: list[Broker] = []

    def open_one(**options: object) -> Broker:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        broker = open_broker(kind.store_url(tmp_path, query))
        opened.append(Settled(broker) if kind.carrier else broker)
        return opened[-1]

    yield open_one
    for broker in opened:
        check_counts(broker)
        broker.close()
        broker.close()  # idempotent
    forget_served(tmp_path)
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def broker(clock: Clock, open_store: Callable[..., Broker]) -> Broker:
    return open_store()


@pytest.fixture
def worker(broker: Broker) -> LiveOwner:
    return LiveOwner(broker)


@pytest.fixture
def consumer(broker: Broker) -> LiveOwner:
    return LiveOwner(broker, "c1", "consumer")


@pytest.fixture
def need(kind: Kind, broker: Broker) -> Callable[[Feature], None]:
    """Skip the test when the broker lacks a feature; the table of features is frozen elsewhere."""

    def check(feature: Feature) -> None:
        if feature not in broker.features:
            pytest.skip(f"{kind.name} has no {feature}")

    return check
