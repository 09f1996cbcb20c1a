"""``tidemill doctor``: is everything in order, and what to do where it is not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.policies import with_policies
from tidemill.brokers.contract.store import Store
from tidemill.brokers.contract.unknown_tasks import MOST_COUNTED, with_unknown_tasks
from tidemill.cli.connect import json_option, open_mill
from tidemill.client.explain import serving
from tidemill.core.errors import StoreFull, TidemillError
from tidemill.core.job import Record, State
from tidemill.core.scoreboard import read_unkillable

__all__ = ["Finding", "doctor", "examine"]

OLD = 300.0
"""Seconds after which a ready job is said to be old."""

LATE = 60.0
"""Seconds past its timeout after which a running job is said to be stuck."""

_LOOK_AGAIN = 0.5  # seconds; a write lock is held for milliseconds
_SAMPLE = 50
_UNKNOWN_MOST = 10  # tasks with jobs set aside that are named
_RUNNING_MOST = 1000


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor's: ``status`` is ok, warn or fail; ``advice`` says what to do."""

    check: str
    status: str
    message: str
    advice: str = ""


@click.command()
@click.option("--url", default=None, metavar="URL", help="Where the jobs live.")
@click.option("--app", default=None, envvar="TIDEMILL_APP", metavar="MODULE:VAR")
@json_option
def doctor(url: str | None, app: str | None, as_json: bool) -> None:
    """Check the store, its disk, its clocks and its workers. Exit code 1 when something fails."""
    from tidemill.cli import console

    findings = [_versions()]
    try:
        with open_mill(url, app) as mill:
            text = f"{mill.broker.url} opens, its format is known"
            findings.append(Finding("broker", "ok", text))
            findings += [*examine(mill), *_schedules(mill)]
    except TidemillError as error:
        said = str(error).splitlines()[0]
        findings.append(Finding("broker", "fail", said, "check the url and its server"))
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        checks = [msgspec.to_builtins(finding) for finding in findings]
        console.print_json({"ok": not failed, "checks": checks})
    else:
        out = console.console()
        for f in findings:
            line = console.styled(f.status)
            line.pad_right(6 - len(f.status))
            line.append(console.clean(f"{f.check:<11}{f.message}", one_line=True))
            out.print(line)
            if f.advice and f.status != "ok":
                out.print(console.clean(f"{'':17}→ {f.advice}", one_line=True))
    sys.exit(1 if failed else 0)


def examine(mill: Tidemill) -> list[Finding]:
    """Every check on an open store, in order. One that breaks down is itself a finding."""
    findings: list[Finding] = []
    checks: tuple[Callable[[Store], Iterator[Finding]], ...] = (
        *(_publishing, _durable, _asked_for, _policies),
    )
    if Feature.INSPECT in mill.broker.features:
        checks = (_granted, _writable, _here, _durable, _cleaning, _space, _clocks)
        checks = (*checks, _workers, _backlog, _limits, _leases, _unknown, _carried)
    for check in checks:
        try:
            findings += check(mill.broker)
        except TidemillError as error:
            name = check.__name__.strip("_")
            findings.append(Finding(name, "fail", str(error), "see the sentence above"))
    return findings


def _schedules(mill: Tidemill) -> Iterator[Finding]:
    """Whether what fires has a task, which only an app can tell, and somebody who declares it."""
    if Feature.SCHEDULES not in mill.broker.features:
        return
    rows = [*mill.schedules]
    unknown = [f"{row.name} ({row.task})" for row in rows if row.known is False]
    undeclared = [row.name for row in rows if row.undeclared]
    for names, said in (
        (unknown, "name a task the app does not have"),
        (undeclared, "do not fire, since no worker declares them any more"),
    ):
        if names:
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            said = f"{len(names)} of {len(rows)} {said}: {shown}"
            yield Finding("schedules", "warn", said, "tidemill schedule remove NAME")
    if rows and not (unknown or undeclared):
        yield Finding("schedules", "ok", f"{len(rows)} in the store")


def _versions() -> Finding:
    """Python and the drivers, as installed."""
    from importlib.metadata import version

    names = ("tidemill", "lmdb", "msgspec")
    found = ", ".join(f"{name} {version(name)}" for name in names)
    system = f"Python {platform.python_version()} on {platform.system()}"
    if int(version("lmdb").split(".")[0]) < 3:
        return Finding("versions", "fail", f"{system}, {found}", "pip install 'lmdb>=3,<4'")
    return Finding("versions", "ok", f"{system}, {found}")


def _writable(broker: Store) -> Iterator[Finding]:
    """Whether this user may write, and how long the disk takes.

    Where files tell, no job is changed. Elsewhere a commit tells: the housekeeping that is due.
    """
    info = broker.info()
    if _held(broker, info):
        text = f"no process can write: the write lock is {info['write_lock']}"
        yield Finding("writable", "fail", text, "calls that write end after the url's patience")
        return
    if info.get("broker") == "lmdb" and os.path.isdir(info["folder"]):
        yield _files(info["folder"])
        return
    broker.tick()  # the first one may have much to clear away
    before = time.monotonic()
    try:
        broker.tick()
    except StoreFull as error:
        yield Finding("writable", "fail", str(error), "make room on the disk, or raise map_size")
        return
    took = (time.monotonic() - before) * 1000
    slow = took > 100
    advice = "the disk is slow to sync: put the store on a local SSD" if slow else ""
    yield Finding("writable", "warn" if slow else "ok", f"a commit took {took:.1f} ms", advice)


def _held(broker: Store, before: dict[str, Any]) -> bool:
    """Whether one process holds the write lock of an LMDB store, and commits nothing meanwhile."""
    if before.get("write_lock", "free") == "free":
        return False
    time.sleep(_LOOK_AGAIN)
    after = broker.info()
    return all(after[name] == before[name] for name in ("write_lock", "commits"))


def _files(folder: str) -> Finding:
    """Of a store on disk: whether its files are its users', and how long the disk takes."""
    from tidemill.brokers.lmdb.files import foreign_files, sync_time

    foreign = foreign_files(folder)
    if foreign:
        text = f"{len(foreign)} files in {folder} may not be written by its users: {foreign[0]}"
        advice = f"give them to the owner of the folder: chown -R --reference={folder} {folder}"
        return Finding("writable", "fail", text, advice)
    took = sync_time(folder) * 1000
    advice = "the disk is slow to sync: put the store on a local SSD" if took > 100 else ""
    text = f"the files are the store's users', and a sync took {took:.1f} ms"
    return Finding("writable", "warn" if took > 100 else "ok", text, advice)


def _publishing(broker: Store) -> Iterator[Finding]:
    """Whether a server that is all we can ask lets us publish, and answers soon."""
    before = time.monotonic()
    info = broker.info()
    took = (time.monotonic() - before) * 1000
    text = f"{info['server']} told all it knows within {took:.0f} ms"
    if info["publishing"] == "open":
        yield Finding("server", "ok", text)
    else:
        advice = "puts are refused, work goes on: see to the memory and the disk of the server"
        yield Finding("server", "fail", f"publishing is {info['publishing']}", advice)
    if info["failed"]:
        text = f"{info['failed']:,} failed jobs are kept"
        yield Finding("failed", "warn", text, "tidemill jobs --state failed, then retry or delete")


def _carried(broker: Store) -> Iterator[Finding]:
    """Of a store with a carrier: whether that lets us publish, and has what it should."""
    info, rows = broker.info(), broker.stats()
    carried, server = sum(row.carried for row in rows), info.get("carrier server")
    if server is None:
        return
    text = f"{server} has {info['carrier ready']:,} ready jobs, of {carried:,} that it was given"
    if info["carrier publishing"] != "open":
        advice = "puts go on, and wait in the store: see to the memory and the disk of the server"
        said = f"publishing is {info['carrier publishing']}"
        yield Finding("carrier", "fail", said, advice)
    elif carried and not info["carrier ready"]:
        advice = "if this stays so, it has lost them: tidemill recall"
        yield Finding("carrier", "warn", text, advice)
    else:
        yield Finding("carrier", "ok", text)


def _asked_for(broker: Store) -> Iterator[Finding]:
    """Queues with jobs that nobody asks for, as far as such a server knows."""
    rows = broker.stats()
    for row in rows:
        if row.ready and not row.consumers:
            text = f"queue {row.name} has {row.ready:,} ready jobs, and nobody asks for more"
            advice = "start a worker, unless all are busy with long jobs: add slots, then"
            yield Finding("queues", "warn", text, advice)
    ready = sum(row.ready for row in rows)
    yield Finding("backlog", "ok", f"{ready:,} ready jobs in {len(rows):,} queues")


def _policies(broker: Store) -> Iterator[Finding]:
    """What operators set on the server that can destroy accepted jobs."""
    server = with_policies(broker)
    if server is None:
        return
    found = server.policies()
    for danger in found.dangers:
        yield Finding("policies", "warn", danger.text, danger.advice)
    if not found.dangers:
        yield Finding("policies", "ok", f"none is known to destroy jobs; {found.seen}")
    if found.delays:
        yield Finding("delays", "ok", found.delays)


def _here(broker: Store) -> Iterator[Finding]:
    where = broker.info().get("moves_to")
    if where:
        advice = f"set TIDEMILL_URL to {where}, and start the workers there"
        yield Finding("moved", "warn", f"all of this store goes to {where}", advice)


def _durable(broker: Store) -> Iterator[Finding]:
    info = broker.info()
    durable, text = info.get("durable"), info.get("durability")
    if durable:
        text = text or "accepted jobs survive power loss: every commit is synced"
        yield Finding("durability", "ok", text)
    elif durable is not None:
        text = text or "commits are not synced: jobs survive kill -9, not power loss"
        advice = info.get("durability_advice", "remove durability=relaxed from the url")
        yield Finding("durability", "warn", text, advice)
    else:
        yield Finding("durability", "warn", "this broker does not say how durable it is")


def _granted(broker: Store) -> Iterator[Finding]:
    """Whether the user of a server has all rights that calls need, now or after a crash."""
    lacking = broker.info().get("missing_grants")
    if lacking:
        text = f"this user lacks {'; '.join(lacking[:3])}" + (" …" if len(lacking) > 3 else "")
        advice = "run the SQL that tidemill migrate URL --grants ROLE prints, as who migrates"
        yield Finding("grants", "fail", text, advice)
    elif lacking is not None:
        yield Finding("grants", "ok", "the user has all rights on the store")


def _cleaning(broker: Store) -> Iterator[Finding]:
    """Old transactions that keep a server from clearing away deleted rows."""
    holders = broker.info().get("held_back_by")
    for text in holders or ():
        advice = (
            "end it: until then the server clears nothing away, and queues get slower "
            "(pg_terminate_backend, ROLLBACK PREPARED, pg_drop_replication_slot)"
        )
        yield Finding("cleaning", "warn", text, advice)
    if holders == []:
        yield Finding("cleaning", "ok", "no old transaction keeps deleted rows")


def _space(broker: Store) -> Iterator[Finding]:
    info = broker.info()
    folder, reserve = info.get("folder"), int(info.get("reserve_bytes") or 0)
    if not folder or not os.path.isdir(folder):
        return
    from tidemill.cli.console import size

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
        full = used > 0.8 * most
        advice = "raise map_size in the url; it is address space, not disk" if full else ""
        yield Finding("map", "warn" if full else "ok", text, advice)


def _clocks(broker: Store) -> Iterator[Finding]:
    now = time.time()
    if now < 1_700_000_000:
        text = f"the clock says {time.strftime('%Y-%m-%d', time.localtime(now))}"
        yield Finding("clock", "fail", text, "set the clock: at= and schedules go by it")
        return
    newest = broker.find(Filter(), 1).records
    ahead = newest[0].envelope.created - now if newest else 0.0
    if ahead > 5:
        text = f"the newest job was created {ahead:.0f} s in the future"
        advice = "the clock was set back, or a producer's is wrong: use NTP"
        yield Finding("clock", "warn", text, advice)
    else:
        yield Finding("clock", "ok", "wall time agrees with the newest job")


def _workers(broker: Store) -> Iterator[Finding]:
    from tidemill.cli.console import clock

    owners = broker.owners()
    workers = [owner for owner in owners if owner.kind == "worker"]
    slots = sum(owner.concurrency for owner in workers)
    text = f"{len(workers)} alive with {slots} slots, {len(owners) - len(workers)} consumers"
    if workers or not any(row.size for row in broker.stats()):
        yield Finding("workers", "ok", text)
    else:
        yield Finding("workers", "warn", text, "start one: tidemill worker MODULE:VAR")
    for owner in workers:  # a board on another machine cannot be read here
        for pid, since in read_unkillable(owner.board, owner.id) if owner.board else ():
            text = f"process {pid} of {owner.name} does not die since {clock(since)}"
            advice = "jobs in its last system calls stay held: look for a dead mount or disk"
            yield Finding("workers", "warn", text, advice)


def _backlog(broker: Store) -> Iterator[Finding]:
    """Jobs that nobody will take, and jobs that have been ready for long."""
    from tidemill.cli.console import span

    worst, where = 0.0, ""
    for row in broker.stats():
        if row.paused and row.ready:
            text = f"queue {row.name} is paused with {row.ready:,} ready jobs"
            yield Finding("queues", "warn", text, f"tidemill resume {row.name}")
        elif row.ready and not serving(broker, row.name) and _has_tasks(broker, row.name):
            text = f"queue {row.name} has {row.ready:,} ready jobs and no worker"
            yield Finding("queues", "warn", text, f"start a worker, or one with -Q {row.name}")
        age = time.time() - row.oldest if row.oldest else 0.0
        if age > worst and not row.paused:
            worst, where = age, row.name
    ready = sum(row.ready for row in broker.stats() if not row.paused)
    text = f"{ready:,} ready jobs wait for limits" if ready else "no job is ready"
    text = f"the oldest ready job of {where} is {span(worst)} old" if where else text
    old = worst > OLD
    advice = f"add workers or slots; tidemill jobs --queue {where} --state ready" if old else ""
    yield Finding("backlog", "warn" if old else "ok", text, advice)


def _unknown(broker: Store) -> Iterator[Finding]:
    """Tasks whose jobs are set aside, as no worker that came so far knows them."""
    if Feature.UNKNOWN not in broker.features:
        return
    from tidemill.cli.console import span

    tasks = with_unknown_tasks(broker, "doctor").unknown_tasks()
    for row in tasks[:_UNKNOWN_MOST]:
        most = " or more" if row.count >= MOST_COUNTED else ""
        queues = ", ".join(row.queues[:3]) + (" …" if len(row.queues) > 3 else "")
        said = f"no worker knows task {row.task}: {row.count:,}{most} job(s) of queue {queues}"
        age = span(max(0.0, time.time() - row.oldest))
        text = f"{said} are set aside, the oldest {age} old"
        advice = f"start a worker whose app has {row.task}, or tidemill cancel --task {row.task}"
        yield Finding("tasks", "warn", text, advice)
    if len(tasks) > _UNKNOWN_MOST:
        text = f"{len(tasks) - _UNKNOWN_MOST:,} more tasks have jobs set aside"
        yield Finding("tasks", "warn", text, "start workers whose apps have them")


def _limits(broker: Store) -> Iterator[Finding]:
    """Queues whose limit lets nothing start, as nobody may mean any more."""
    if Feature.LIMITS not in broker.features:
        return
    ready = {row.name: row.ready for row in broker.stats()}
    for row in with_limits(broker, "limits").limits():
        waiting = ready.get(row.name, 0) if row.queue else 0
        breaker, rate = row.terms.breaker, row.terms.rate
        if breaker is not None and row.failures >= breaker[0]:
            text = f"the breaker of queue {row.name} is open: {row.failures} failures in a row"
            yield Finding("limits", "warn", text, f"tidemill jobs --queue {row.name}")
        elif waiting and ((rate is not None and not rate[0]) or row.terms.concurrency == 0):
            text = f"the limit of queue {row.name} lets none of {waiting:,} ready jobs start"
            advice = f"tidemill limit {row.name} --queue --rate 10/s --concurrency none"
            yield Finding("limits", "warn", text, advice)


def _has_tasks(broker: Store, queue: str) -> bool:
    """True when jobs for workers are ready there, as far as a sample shows, not messages alone."""
    ready = Filter(states=frozenset({State.READY}), queue=queue)
    return any(not r.envelope.is_message for r in broker.find(ready, _SAMPLE).records)


def _leases(broker: Store) -> Iterator[Finding]:
    """Running jobs that should no longer be."""
    running: list[Record] = []
    count = sum(row.running for row in broker.stats())
    if count:
        most = min(count, _RUNNING_MOST)
        running = broker.find(Filter(states=frozenset({State.RUNNING})), most).records
    alive = {owner.name for owner in broker.owners()}
    tests: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("held by a worker that is gone", lambda r: r.worker not in alive, "start a worker"),
        ("past the timeout and still held", _is_late, "send the worker USR1 for its stacks"),
    )
    # Somebody may have finished since the list was made: only what is so still counts.
    for what, is_bad, advice in tests:
        bad = [record.envelope.id for record in running if is_bad(record)]
        bad = [i for i in bad if (r := broker.get(i)) and r.state is State.RUNNING and is_bad(r)]
        if bad:
            text = f"{len(bad):,} running jobs {what}, for example {bad[0]}"
            yield Finding("leases", "fail", text, f"{advice}; tidemill job {bad[0]}")
            return
    yield Finding("leases", "ok", f"{count:,} running, held by live owners, within their time")


def _is_late(record: Record) -> bool:
    timeout = record.envelope.timeout
    return bool(timeout) and time.time() - record.leased > timeout + LATE
