"""The present problems: the banners of the overview."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.brokers.contract.unknown_tasks import with_unknown_tasks
from tidemill.core.job import State
from tidemill.core.scoreboard import read_unkillable
from tidemill.dashboard.formats import duration, number, size
from tidemill.dashboard.page import Page

__all__ = ["Problem", "has_tasks", "problems", "worker_command"]

DISK_FULL = 0.8
"""A disk, or the map of an LMDB store, is nearly full when more than this part is used."""

_SAMPLE = 20
_MOST_HELD = 1000
_SHARED = 10.0  # seconds for which viewers share an answer that needs a search


class Problem(NamedTuple):
    """A banner: its level (``bad`` or ``warn``), the problem, and the remedy.

    ``link`` is a page that shows more; ``command`` is for a terminal.
    """

    level: str
    text: str
    link: str = ""
    link_text: str = ""
    command: str = ""


def worker_command(page: Page, queue: str = "") -> str:
    """The command that starts a worker, for a queue."""
    own = f" -Q {shlex.quote(queue)}" if queue else ""
    return f"tidemill worker {shlex.quote(page.dashboard.app)}{own}"


def problems(page: Page) -> list[Problem]:
    """All problems, the worst first."""
    found = [*_store(page), *_disk(page), *_queues(page)]
    if page.has(Feature.INSPECT):
        found += [*_unknown(page), *_lost(page), *_unkillable(page)]
    return sorted(found, key=lambda one: one.level)


def _store(page: Page) -> Iterator[Problem]:
    facts = page.look.facts
    if facts.get("puts_refused"):
        yield Problem("bad", f"The store refuses new jobs: {facts['puts_refused']}")
    if facts.get("moves_to"):
        yield Problem("warn", f"This store moves to {facts['moves_to']}.")
    if facts.get("missing_grants"):
        lacking = "; ".join(facts["missing_grants"][:3])
        yield Problem("bad", f"The database user lacks rights: {lacking}")


def _disk(page: Page) -> Iterator[Problem]:
    facts = page.look.facts
    folder = str(facts.get("folder") or "")
    if folder and os.path.isdir(folder):
        disk = shutil.disk_usage(folder)
        used = 1 - disk.free / disk.total
        if used > DISK_FULL:
            text = f"The disk of the store is {used:.0%} full: {size(disk.free)} are free."
            yield Problem("bad" if used > 0.95 else "warn", text, page.url("/settings"), "Settings")
    used_bytes, most = int(facts.get("used_bytes") or 0), int(facts.get("map_bytes") or 0)
    if most and used_bytes / most > DISK_FULL:
        text = f"{size(used_bytes)} of the map of {size(most)} are used: raise map_size in the URL."
        yield Problem("warn", text, page.url("/settings"), "Settings")


def _queues(page: Page) -> Iterator[Problem]:
    """Paused queues, and queues with jobs and no worker; one banner for a queue that is both."""
    paused = [row for row in page.look.queues if row.paused]
    unserved = _unserved(page)
    is_lonely = len(unserved) > 1 and not page.look.workers
    for row in paused[:5]:
        wait = "1 job waits" if row.ready == 1 else f"{number(row.ready)} jobs wait"
        link = page.url("/queues/{}", row.name)
        if row in unserved and not is_lonely:
            text = f"Queue {row.name} is paused and has no worker, and {wait} in it."
            yield Problem("bad", text, link, "Show the queue", worker_command(page, row.name))
        else:
            text = f"Queue {row.name} is paused, and {wait} in it."
            yield Problem("warn", text, link, "Show the queue")
    if len(paused) > 5:
        text = f"{len(paused) - 5} more queues are paused."
        yield Problem("warn", text, page.url("/queues"), "Show all queues")
    if is_lonely:
        ready = sum(row.ready for row in unserved)
        text = f"No worker is alive: {number(ready)} jobs of {len(unserved)} queues are ready."
        yield Problem("bad", text, page.url("/queues"), "Show the queues", worker_command(page))
        return
    unserved = [row for row in unserved if row not in paused[:5]]
    for row in unserved[:5]:
        text = f"Queue {row.name} has {_jobs(row.ready, 'ready')} and no worker."
        link = page.url("/queues/{}", row.name)
        yield Problem("bad", text, link, "Show the queue", worker_command(page, row.name))
    if len(unserved) > 5:
        text = f"{len(unserved) - 5} more queues have jobs and no worker."
        yield Problem("bad", text, page.url("/queues"), "Show all queues")


def _unserved(page: Page) -> list[QueueStats]:
    """The queues that have ready jobs of tasks, and no worker."""
    if not page.has(Feature.INSPECT):
        return []
    rows = [row for row in page.look.queues if row.ready and not page.look.serving(row.name)]
    return [row for row in rows if has_tasks(page, row.name)]


def _jobs(count: int, kind: str) -> str:
    """A number of jobs in words: ``1 ready job``, ``2,000 ready jobs``."""
    return f"{number(count)} {kind} job{'' if count == 1 else 's'}"


def has_tasks(page: Page, queue: str) -> bool:
    """True when the queue has ready jobs of tasks, which need a worker. Messages need none."""
    what = Filter(states=frozenset({State.READY}), queue=queue)

    def look() -> bool:
        return any(not r.envelope.is_message for r in page.mill.broker.find(what, _SAMPLE).records)

    return page.cached(("has tasks", queue), _SHARED, look)


def _unknown(page: Page) -> Iterator[Problem]:
    """Tasks that no worker knows."""
    if not page.has(Feature.UNKNOWN):
        return
    broker = with_unknown_tasks(page.mill.broker, "the dashboard")
    for row in page.cached("unknown tasks", _SHARED, broker.unknown_tasks)[:3]:
        text = f"No worker knows the task {row.task}: {number(row.count)} of its jobs wait aside."
        yield Problem(
            "warn", text, page.jobs_url(state="scheduled", task=row.task), "Show the jobs"
        )


def _lost(page: Page) -> Iterator[Problem]:
    """Running jobs of workers that are gone."""
    what = Filter(states=frozenset({State.RUNNING}))
    running = page.cached("held", _SHARED, lambda: page.mill.broker.find(what, _MOST_HELD).records)
    alive = {owner.name for owner in page.look.owners}
    gone = sorted({r.worker for r in running if r.worker and r.worker not in alive})
    held = [r for r in running if r.worker in gone]
    now = page.mill.broker.wait_for([record.envelope.id for record in held], 0) if held else ()
    still = [record for record in now if record is not None and record.worker in gone]
    if still:
        text = f"{_jobs(len(still), 'running')} of workers that are gone: {gone[0]}"
        yield Problem("warn", text, page.jobs_url(state="running"), "Show running jobs")


def _unkillable(page: Page) -> Iterator[Problem]:
    """Processes of workers on this machine that still run after their SIGKILL."""
    for owner in page.look.workers:
        for pid, since in read_unkillable(owner.board, owner.id) if owner.board else ():
            text = (
                f"Process {pid} of {owner.name} has not ended since its SIGKILL "
                f"{duration(page.look.at - since)} ago: look for a dead mount or disk."
            )
            yield Problem("warn", text, page.url("/workers"), "Show the workers")
