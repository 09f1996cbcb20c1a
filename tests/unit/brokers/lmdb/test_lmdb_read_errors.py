"""Errors of LMDB in calls that only read become errors of tidemill, as in commits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
from lmdb_desk import job

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.job import State
from tidemill.errors import BrokerUnavailable

READS: dict[str, Callable[[LmdbBroker], Any]] = {
    "get": lambda broker: broker.get("a"),
    "find": lambda broker: broker.find(Filter()),
    "stats": lambda broker: broker.stats(),
    "owners": lambda broker: broker.owners(),
    "limits": lambda broker: broker.limits(),
    "ahead": lambda broker: broker.ahead("a", 9),
    "held": lambda broker: broker.held("a"),
    "head": lambda broker: broker.head("default", State.READY, 1),
    "info": lambda broker: broker.info(),
    "schedules": lambda broker: broker.schedules(["s"]),
    "list_schedules": lambda broker: broker.list_schedules(),
    "adopted": lambda broker: broker.adopted("m"),
    "reap": lambda broker: broker.reap(),
    "count_silence": lambda broker: broker.count_silence(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_after_the_callers_environment_was_closed_is_one_sentence(
    tmp_path: Path, name: str
) -> None:
    env = lmdb.open(str(tmp_path), map_size=1 << 26, max_dbs=40, lib_version=0)
    broker = LmdbBroker.around(env)
    broker.put([job(id="a")])
    env.close()
    with pytest.raises(BrokerUnavailable, match=f"the LMDB store in {tmp_path}: "):
        READS[name](broker)


def test_a_backup_that_fails_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_broker(f"lmdb://{tmp_path}/store")
    assert isinstance(broker, LmdbBroker)

    class Full:
        begin = broker._store.env.begin

        def copyfd(self, *_: object, **__: object) -> None:
            raise lmdb.Error("mdb_env_copy2: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(broker._store, "env", Full())
        with pytest.raises(BrokerUnavailable, match="Input/output error"):
            broker.backup(str(tmp_path / "copy"))
    broker.backup(str(tmp_path / "copy"))  # the failed copy has left no file behind
    broker.close()
