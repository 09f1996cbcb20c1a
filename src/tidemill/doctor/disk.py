"""Checks of a store's place: writing, the disk, and the map of LMDB."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

from tidemill.brokers.contract.rpc import NotAllowed
from tidemill.brokers.contract.store import Store
from tidemill.doctor.findings import Finding, Seen
from tidemill.doctor.words import size
from tidemill.errors import StoreFull

NEARLY = 0.9  # the map counts as nearly full when puts have used more than this part of their room
_LOOK_AGAIN = 0.5  # seconds between two checks of the write lock; a commit takes milliseconds


def writable(seen: Seen) -> Iterator[Finding]:
    """Check that this user may write, and measure a sync or a commit.

    On an LMDB store the check looks at the files and commits nothing. On other stores the check
    makes commits, by doing the housekeeping that is due.
    """
    broker, info = seen.broker, seen.info
    if _held(broker, info):
        text = f"no process can write: the write lock is {info['write_lock']}"
        advice = "end that process, or resume it with kill -CONT; until then all writes fail"
        yield Finding("writable", "fail", text, advice)
        return
    if info.get("broker") == "lmdb" and os.path.isdir(info["folder"]):
        yield _files(info["folder"])
        return
    try:
        broker.tick()  # the first tick may have much to delete, so only the second is timed
        before = time.monotonic()
        broker.tick()
    except NotAllowed:
        text = "not checked, as this token may only read; use the token of an operator"
        yield Finding("writable", "ok", text)
        return
    except StoreFull as error:
        yield Finding("writable", "fail", str(error), "make room on the disk, or raise map_size")
        return
    yield _timed("a commit took", time.monotonic() - before)


def _timed(text: str, seconds: float) -> Finding:
    slow = seconds > 0.1
    advice = "the disk is slow to sync: put the store on a local SSD" if slow else ""
    return Finding("writable", "warn" if slow else "ok", f"{text} {seconds * 1000:.1f} ms", advice)


def _held(broker: Store, before: dict[str, Any]) -> bool:
    """True when one process keeps the write lock of an LMDB store, and commits nothing."""
    if before.get("write_lock", "free") == "free":
        return False
    time.sleep(_LOOK_AGAIN)
    after = broker.info()
    return all(after[name] == before[name] for name in ("write_lock", "commits"))


def _files(folder: str) -> Finding:
    from tidemill.brokers.lmdb.engine.environment import foreign_files, sync_time

    foreign = foreign_files(folder)
    if foreign:
        text = f"{len(foreign)} files in {folder} may not be written by its users: {foreign[0]}"
        advice = f"give them to the owner of the folder: chown -R --reference={folder} {folder}"
        return Finding("writable", "fail", text, advice)
    return _timed("the store's users may write its files, and a sync took", sync_time(folder))


def space(seen: Seen) -> Iterator[Finding]:
    """Check the room on the disk, and in the map of an LMDB store."""
    info = seen.info
    if info.get("puts_refused"):
        text = f"puts are refused: {info['puts_refused']}"
        yield Finding("space", "fail", text, "make room, or purge or finish jobs")
    folder, reserve = info.get("folder"), int(info.get("reserve_bytes") or 0)
    if not folder or not os.path.isdir(folder):
        return
    from tidemill.brokers.lmdb.engine.disk_reserve import MAP_FOR_PUTS

    disk = shutil.disk_usage(folder)
    text = f"{size(disk.free)} free of {size(disk.total)}, reserve {size(reserve)}"
    if disk.free < reserve:
        yield Finding("disk", "fail", text, "puts are refused: make room, or purge or finish jobs")
    elif disk.free < 4 * reserve or disk.free < disk.total // 50:
        yield Finding("disk", "warn", text, "make room before puts are refused")
    else:
        yield Finding("disk", "ok", text)
    used, most = int(info.get("used_bytes") or 0), int(info.get("map_bytes") or 0)
    if most:
        text = f"{size(used)} used of a map of {size(most)}"
        full = used / most / MAP_FOR_PUTS  # above 1, puts are refused
        status = "fail" if full > 1 else "warn" if full > NEARLY else "ok"
        refused = "puts are refused: " if full > 1 else ""
        advice = f"{refused}raise map_size in the url; it is address space, not disk"
        yield Finding("map", status, text, advice if full > NEARLY else "")
