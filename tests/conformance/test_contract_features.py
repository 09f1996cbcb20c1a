"""Which broker can do what: frozen, so that a feature cannot vanish unseen."""

from __future__ import annotations

import pytest
from broker_driver import job
from kinds import NOT_BY_RABBITMQ, Kind

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.errors import FeatureMissing

F = Feature
EVERYTHING = frozenset(Feature)
DJANGO = EVERYTHING - {F.BACKUP, F.NAMED, F.REMOTE_OWNERS}
FEATURES = {
    "memory": EVERYTHING - {F.DURABLE, F.PROCESSES, F.TRANSACTIONS, F.BACKUP},
    "lmdb": EVERYTHING,
    "redis": EVERYTHING - {F.TRANSACTIONS, F.BACKUP},
    "postgresql": EVERYTHING - {F.BACKUP},
    "django": DJANGO,
    "django+postgresql": DJANGO,
    "django+mariadb": DJANGO,
    "http": EVERYTHING - {F.TRANSACTIONS, F.REMOTE_OWNERS, F.NAMED},
    "rabbitmq": frozenset({F.DURABLE, F.PROCESSES, F.DELAY, F.PRIORITY, F.FAILED}),
}


def test_the_features_are_those_of_the_table(kind: Kind, broker: Broker) -> None:
    assert broker.features == FEATURES[kind.name]


def test_only_rabbitmq_lacks_promises_without_a_feature(kind: Kind) -> None:
    assert kind.cannot == (NOT_BY_RABBITMQ if kind.name == "rabbitmq" else frozenset())
    assert len(NOT_BY_RABBITMQ) == 5


def test_a_missing_feature_is_refused_naming_both(broker: Broker) -> None:
    scheme = broker.url.split(":", 1)[0]
    for feature in EVERYTHING - broker.features:
        with pytest.raises(FeatureMissing, match=rf"^backup=.*{feature}.*{scheme}"):
            need(broker, feature, "backup=")
    for feature in broker.features:
        need(broker, feature, "anything")


def test_txn_and_backup_are_refused_by_name_where_they_are_missing(broker: Broker) -> None:
    if F.TRANSACTIONS not in broker.features:
        with pytest.raises(FeatureMissing, match="txn="):
            broker.put([job()], txn=object())
    if F.BACKUP not in broker.features:
        with pytest.raises(FeatureMissing, match="backup"):
            broker.backup("/nowhere")
