"""``django://`` on a database whose disk is full: one sentence says so, and nothing is stored."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_driver import LiveOwner, job
from servers import django_on_mariadb, django_on_postgres, django_on_sqlite

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.django.broker import DjangoBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings
from tidemill.core.job import Outcome, State, Verdict
from tidemill.errors import StoreFull

pytestmark = pytest.mark.everyday("Postgres")

LARGE = "x" * 100_000
SENTENCE = r"^database '\w+' has no room left \([^\n]+\); make room on its disk$"


class Disk:
    """The disk of a database, which tests fill and empty."""

    def __init__(self, folder: Path) -> None:
        self.url = self.make(str(folder))
        self.alias = self.url.removeprefix("django://")

    make: Callable[[str], str]

    def fill(self) -> None:
        raise NotImplementedError

    def empty(self) -> None:
        raise NotImplementedError

    def execute(self, text: str) -> None:
        from django.db import connections

        with connections[self.alias].cursor() as cursor:
            cursor.execute(text)


class SQLite(Disk):
    """A file that may have no further page, on connections that are opened from now on."""

    make = staticmethod(django_on_sqlite)

    @property
    def options(self) -> dict[str, Any]:
        from django.db import connections

        options: dict[str, Any] = connections.settings[self.alias]["OPTIONS"]
        return options

    def fill(self) -> None:
        self.options["init_command"] = "PRAGMA max_page_count = 1"

    def empty(self) -> None:
        from django.db import connections

        self.options.clear()
        connections[self.alias].close()


class Postgres(Disk):
    """A table whose triggers raise the server's error."""

    make = staticmethod(django_on_postgres)

    def fill(self) -> None:
        said = "could not extend file: No space left on device"
        self.execute(
            "CREATE FUNCTION is_full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"RAISE EXCEPTION USING ERRCODE = '53100', MESSAGE = '{said}', HINT = 'Look.'; "
            "END $$; "
            "CREATE TRIGGER is_full BEFORE INSERT OR UPDATE ON tidemill_job "
            "FOR EACH ROW EXECUTE FUNCTION is_full()"
        )

    def empty(self) -> None:
        self.execute("DROP FUNCTION is_full() CASCADE")


class MariaDB(Disk):
    """A table whose triggers raise the server's error."""

    make = staticmethod(django_on_mariadb)

    def fill(self) -> None:
        for event in ("INSERT", "UPDATE"):
            self.execute(
                f"CREATE TRIGGER is_full_{event} BEFORE {event} ON tidemill_job FOR EACH ROW "
                "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1114, MESSAGE_TEXT = 'It is full'"
            )

    def empty(self) -> None:
        for event in ("INSERT", "UPDATE"):
            self.execute(f"DROP TRIGGER is_full_{event}")


DISKS: list[type[Disk]] = [SQLite, Postgres]
if "TIDEMILL_TEST_MARIADB" in os.environ:
    DISKS.append(MariaDB)


@pytest.fixture(params=DISKS, ids=lambda kind: kind.__name__)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    from django.db import connections

    disk: Disk = request.param(tmp_path)
    yield disk
    connections[disk.alias].close()


@pytest.fixture
def broker(disk: Disk) -> Iterator[DjangoBroker]:
    broker = open_broker(f"{disk.url}?patience=20")
    yield broker
    broker.close()


def fill(disk: Disk, broker: DjangoBroker) -> None:
    disk.fill()
    # From now on each call opens a connection, which finds the disk full.
    broker._store.database.close()


def large(**fields: Any) -> Envelope:
    return job(headers={"text": LARGE}, **fields)


def ids_of(broker: DjangoBroker) -> set[str]:
    return {record.envelope.id for record in broker.find(Filter()).records}


LIMIT = JobLimit("one", "a", 1.0, LimitSettings(concurrency=1))
PUTS: dict[str, Callable[[], list[Envelope]]] = {
    "one": lambda: [large()],
    "many": lambda: [large(), large()],
    "keyed": lambda: [large(key="k")],
    "limited": lambda: [large(limit=LIMIT)],
}


@pytest.mark.parametrize("make", PUTS.values(), ids=PUTS)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside-atomic"])
def test_a_put_is_refused_until_there_is_room(
    disk: Disk, broker: DjangoBroker, make: Callable[[], list[Envelope]], inside: bool
) -> None:
    from django.db import transaction

    # given a full disk
    block = functools.partial(transaction.atomic, disk.alias) if inside else contextlib.nullcontext
    fill(disk, broker)
    # when jobs are put, then they are refused
    with pytest.raises(StoreFull, match=SENTENCE), block():
        broker.put(make())
    # and accepted when there is room
    disk.empty()
    jobs = make()
    with block():
        broker.put(jobs)
    assert ids_of(broker) == {one.id for one in jobs}


def test_an_outcome_is_refused_until_there_is_room(disk: Disk, broker: DjangoBroker) -> None:
    # given a running job, and a full disk
    owner = LiveOwner(broker)
    broker.put([job(id="a")])
    [lease] = owner.take()
    fill(disk, broker)
    verdict = Verdict(lease.token, Outcome.SUCCESS, result=LARGE.encode())
    # when its outcome is handed in, then it is refused
    with pytest.raises(StoreFull, match=SENTENCE):
        owner.exchange(verdicts=[verdict])
    # and accepted when there is room
    disk.empty()
    assert owner.exchange(verdicts=[verdict]).settled == [True]
    [record] = broker.find(Filter()).records
    assert record.state is State.SUCCEEDED
