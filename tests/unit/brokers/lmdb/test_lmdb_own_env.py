"""Stores by prefix: in the caller's own environment, reopened by URL, several in one directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from lmdb_desk import Process, ids, job

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Owner
from tidemill.errors import BrokerUnavailable, InvalidOption

pytestmark = pytest.mark.everyday


@pytest.fixture(params=["directory", "file"])
def env(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[lmdb.Environment]:
    path, subdir = tmp_path / "my data", request.param == "directory"
    with lmdb.open(str(path), map_size=1 << 26, max_dbs=40, subdir=subdir, lib_version=0) as env:
        yield env


@pytest.mark.parametrize("prefix", ["tidemill-", "tm-", "a b/ü&%"])
def test_the_url_of_an_own_environment_opens_it_in_another_process(
    env: lmdb.Environment, prefix: str
) -> None:
    broker = LmdbBroker.around(env, prefix)
    assert ("prefix=" in broker.url) is (prefix != "tidemill-")
    assert "map_size=67108864" in broker.url
    broker.put([job(id="one")])
    code = """
        broker.attach(Owner(id="o", name="w"))
        say([lease.open().id for lease in take("o", 9)])
    """
    with Process(broker.url, code) as other:
        other.expect("['one']")
    broker.close()


def test_in_the_same_process_the_environment_is_shared(env: lmdb.Environment) -> None:
    # case Q12
    guest = LmdbBroker.around(env, "tm-")
    again, same = open_broker(guest.url), LmdbBroker.around(env, "tm-")
    guest.put([job(id="one")])
    guest.close()
    assert ids(again) == ids(same) == {"one"}
    again.close()
    same.close()
    assert env.begin().stat()  # it is still the caller's to use


def test_an_environment_that_nobody_gave_us_is_an_error_that_says_so(env: lmdb.Environment) -> None:
    guest = LmdbBroker.around(env, "tm-")
    guest.close()
    with pytest.raises(BrokerUnavailable, match=r"env="):
        open_broker(guest.url)


def test_prefixes_keep_stores_in_one_directory_apart(tmp_path: Path) -> None:
    # case Q5
    url = f"lmdb://{tmp_path}/store"
    with (
        contextlib.closing(open_broker(url)) as plain,
        contextlib.closing(open_broker(url + "?prefix=b")) as other,
    ):
        for broker, name in ((plain, "p"), (other, "o")):
            broker.attach(Owner(id=name, name=name))  # the first owner of each: one number
            broker.put([job(id=f"{name}1")])
        assert (ids(plain), ids(other)) == ({"p1"}, {"o1"})
        assert [o.id for o in plain.owners()] == ["p"]
        # and a put in one wakes nobody of the other, whose own hint it would cost
        for broker, name in ((plain, "p"), (other, "o")):
            assert len(broker.exchange(Step(name, want=Want(5))).leases) == 1
            broker.wait(name, 0)
            broker.exchange(Step(name, want=Want(5)))
        plain.put([job()])
        assert other.exchange(Step("o", want=Want(5))).leases == []
        assert len(plain.exchange(Step("p", want=Want(5))).leases) == 1
        assert plain.boards != other.boards


@pytest.mark.parametrize("prefix", ["", "%00", "x" * 201, "%20" * 190])
def test_a_prefix_is_a_name(tmp_path: Path, prefix: str) -> None:
    # case Q17
    with pytest.raises(InvalidOption, match=r"prefix"):
        open_broker(f"lmdb://{tmp_path}/store?prefix={prefix}")


def test_an_environment_must_be_one() -> None:
    with pytest.raises(InvalidOption, match=r"env must be"):
        LmdbBroker.around("here", "tm-")  # type: ignore[arg-type]


def test_only_the_caller_of_an_own_environment_is_asked_for_its_transaction(
    env: lmdb.Environment, tmp_path: Path
) -> None:
    guest, own = LmdbBroker.around(env, "tm-"), open_broker(f"lmdb://{tmp_path}/own")
    for broker, is_asked in ((guest, True), (own, False)):
        lock = broker._store.environment.write_lock
        assert lock.take()
        assert ("pass it as txn=" in lock.holder()) is is_asked
        lock.free()
        broker.close()
