"""Notes on the named records of a store: written, listed, replaced by one of two, and deleted."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import cast

import pytest

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.schedules import LAST_OWN
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.notes import Notes
from tidemill.worker.declarations import TaskDeclarations


@pytest.fixture
def store(need: Callable[[Feature], None], broker: Broker) -> Store:
    need(Feature.HISTORY)
    return cast(Store, broker)


@pytest.fixture
def notes(store: Store) -> Notes:
    return Notes(store, "bulk", "bulk operations")


def bodies(notes: Notes) -> list[bytes]:
    return [note.body for note in notes.list()]


def test_notes_are_listed_by_kind_and_name_in_pages(store: Store, notes: Notes) -> None:
    other = Notes(store, "bulk-other", "others")
    other.put("a", b"other")
    for number in range(600):
        notes.put(f"{number:03}", b"%d" % number)
    assert bodies(notes) == [b"%d" % number for number in range(600)]
    assert bodies(other) == [b"other"]
    assert [note.body for note in notes.list("009", "012")] == [b"10", b"11"]
    assert store.list_schedules(LAST_OWN, 10) == []


def test_a_note_is_written_over_an_earlier_note(notes: Notes) -> None:
    notes.put("ä", b"1")
    notes.put("ä", b"2")
    note = notes.get("ä")
    assert note.body == b"2"
    assert bodies(notes) == [b"2"]
    assert notes.get("b") is None


def test_a_note_with_a_long_name_is_found(notes: Notes) -> None:
    names = ["ä" * 200, "ä" * 201]
    for name in names:
        notes.put(name, name.encode())
    assert [note.body.decode() for name in names if (note := notes.get(name))] == names


def test_of_two_writers_the_first_replaces_a_note(notes: Notes) -> None:
    known = notes.put("a", b"1")
    new = notes.replace(known, b"2")
    assert new is not None
    assert notes.replace(known, b"3") is None
    assert not notes.delete(known)
    assert bodies(notes) == [b"2"]
    assert notes.delete(new)
    assert bodies(notes) == []


def test_two_writers_at_once_both_write(notes: Notes) -> None:
    threads = [Thread(target=lambda: [notes.put("a", b"x") for _ in range(10)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert bodies(notes) == [b"x"]


def test_a_worker_deletes_a_note_whose_time_is_over(store: Store, notes: Notes) -> None:
    notes.put("long", b"1", seconds=1000.0)
    over = notes.put("short", b"2", seconds=0.001)
    kept = TaskDeclarations().expire(store, [over])
    assert kept == []
    assert bodies(notes) == [b"1"]
