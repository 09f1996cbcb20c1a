"""A store that is moved, deleted or made anew while processes have it open."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from lmdb_desk import Process

from tidemill.brokers.registry import open_broker
from tidemill.core.job import Owner
from tidemill.errors import StoreGone

pytestmark = pytest.mark.everyday

NEW_STORE = """
    for name in ("one", "two", "three"):
        broker.attach(Owner(id=name, name=name))
    broker.put([Envelope(id="new", task="t")])
    say("made")
    sys.stdin.readline()
    broker.tick()
    say([sorted(o.id for o in broker.owners()), broker.get("new").state.value])
"""


def forget(folder: Path, how: str) -> None:
    """Take the store away from those who have it open."""
    if how == "moved":
        folder.rename(folder.with_name("away"))
    elif how == "moved with the folder above":
        folder.parent.rename(folder.parent.with_name("deeper"))
    elif how == "deleted":
        shutil.rmtree(folder)
    else:
        for name in ("data.mdb", "lock.mdb"):
            (folder / name).unlink()


@pytest.mark.parametrize("how", ["moved", "deleted", "only its two files deleted"])
def test_a_forgotten_owner_touches_nothing_of_the_new_store(tmp_path: Path, how: str) -> None:
    # given an owner whose store was taken away, and a new store with three owners in its place
    folder = tmp_path / "store"
    broker = open_broker(f"lmdb://{folder}")
    broker.attach(Owner(id="forgotten", name="f"))
    forget(folder, how)
    with Process(f"lmdb://{folder}", NEW_STORE) as new:
        new.expect("made")
        # when the forgotten one does all its housekeeping, in other files
        if how != "moved":
            assert broker._store.wakeups._folder.names() == []
        for act in (broker.tick, broker.reap, lambda: broker.wait("forgotten", 0)):
            with pytest.raises(StoreGone, match="was deleted or replaced while it was open"):
                act()
        broker._store.wakeups.ring_owners()
        broker._commit(lambda commit: broker._owners.sweep(commit))
        broker.close()
        # then all owners of the new store live, and are seen to
        names = {f"{number}.fifo" for number in (1, 2, 3)}
        assert names <= set(os.listdir(folder / "owners"))
        new.tell()
        new.expect("[['one', 'three', 'two'], 'ready']")


@pytest.mark.parametrize(
    "how", ["moved", "moved with the folder above", "deleted", "only its two files deleted"]
)
def test_an_owner_hears_before_it_sleeps_that_its_store_is_gone(tmp_path: Path, how: str) -> None:
    # given an owner whose store is taken away
    folder = tmp_path / "deep" / "store"
    broker = open_broker(f"lmdb://{folder}")
    broker.attach(Owner(id="o", name="w"))
    broker.wait("o", 0)
    forget(folder, how)
    # then no sleep lasts longer than 30 s, and it hears of it before its next sleep
    assert broker._next_tick - time.monotonic() <= 30
    with pytest.raises(StoreGone):
        broker.wait("o", 25)
    broker.close()


def test_a_board_is_found_when_the_store_is_mounted_elsewhere(tmp_path: Path) -> None:
    # law 6. Given a worker that died with two jobs, of which one ran
    url = f"lmdb://{tmp_path}/here/store"
    code = """
        from tidemill.core.scoreboard import Scoreboard
        broker.put([Envelope(id="ran", task="t"), Envelope(id="held", task="t")])
        path = os.path.join(broker.boards, "o")
        board = Scoreboard(path, 4)
        board.claim("o")
        broker.attach(Owner(id="o", name="dead", board=path))
        leases = {l.open().id: l for l in take("o", 2)}
        board.start(0, leases["ran"].token, 1, time.time(), 0.0)
        say("running")
        time.sleep(60)
    """
    with Process(url, code) as process:
        process.expect("running")
        process.kill()
    # when its volume is mounted under another path
    (tmp_path / "here").rename(tmp_path / "there")
    broker = open_broker(f"lmdb://{tmp_path}/there/store")
    broker.tick()
    # then what ran used an attempt, and what was held did not; neither is a loss without a witness
    ran, held = broker.get("ran"), broker.get("held")
    assert [(r.attempt, r.losses) for r in (ran, held)] == [(1, 0), (0, 0)]
    assert not (tmp_path / "there" / "store" / "boards" / "o").exists()
    broker.close()
