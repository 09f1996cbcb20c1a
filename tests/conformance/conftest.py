"""Fixtures of the conformance suite; the brokers it runs on are listed in ``kinds.py``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from broker_driver import LiveOwner, check_counts
from chosen import proves_more, tier_of_kind
from kinds import KINDS, STILL, Clock, Kind
from servers import forget_served
from test_contract_features import FEATURES
from tiers import MARKS, latest, tier_of

from tidemill import Tidemill
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.registry import open_broker
from tidemill.errors import FeatureMissing


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*what): features, or promises of Kind.cannot")
    config.addinivalue_line("markers", "still_clock: the clock of a server stands still, too")
    config.addinivalue_line("markers", "moving_clock: the test waits for the broker's clock")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what proves nothing more, and say for which tier the rest is.

    Moves have LMDB at one end: the rows of a broker do not depend on the other end.
    """

    def is_left_out(item: pytest.Item) -> bool:
        kinds = kinds_of(item)
        if len(kinds) > 1 and not any(kind.name == "lmdb" for kind in kinds):
            return True
        return not all(proves_more(kind, *names_of(item)) for kind in kinds)

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_left_out(item)]
    for item in items:
        if kinds := kinds_of(item):
            names = names_of(item)
            tier = latest(tier_of(item), *(tier_of_kind(kind, *names) for kind in kinds))
            marks = [mark for mark, (runs, _) in MARKS.items() if runs == tier]
            for mark in marks:
                item.add_marker(mark, append=False)


def names_of(item: pytest.Item) -> tuple[str, str]:
    """The names of the file and the test, as ``chosen.py`` writes them."""
    test = item.name.partition("[")[0].removeprefix("test_")
    return item.path.stem.removeprefix("test_contract_"), test


def kinds_of(item: pytest.Item) -> list[Kind]:
    """The brokers of a test."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [each for each in params if isinstance(each, Kind)]


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


FAR = ("{redis}", "{postgres}", "{django-postgres}", "{django-mariadb}")
"""Stores whose server reads the clock."""


@pytest.fixture
def clock(request: pytest.FixtureRequest, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the broker. It all but stands still, so that a slow machine costs no time of the
    broker.

    A server reads its clock some moment after a call has begun, so a still clock would go back by
    such moments. There the clock stands still only in tests with the mark ``still_clock``.
    """
    marks = {mark.name for mark in request.node.iter_markers()}
    is_far = any(name in kind.url for name in FAR)
    is_still = "still_clock" in marks if is_far else "moving_clock" not in marks
    return Clock(kind, monkeypatch, STILL if is_still else 1.0)


@pytest.fixture
def open_store(kind: Kind, tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Open brokers, with options for the URL; check their counters at the end."""
    opened: list[Broker] = []

    def open_one(**options: object) -> Broker:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        opened.append(open_broker(kind.store_url(tmp_path, query)))
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
def mill(broker: Broker, kind: Kind, tmp_path: Path) -> Iterator[Tidemill]:
    """An app on the broker's store; in memory it is the broker itself."""
    with Tidemill(kind.store_url(tmp_path)) as mill:
        if kind.name == "memory":
            mill.runtime._broker = broker  # type: ignore[assignment]
        yield mill


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
