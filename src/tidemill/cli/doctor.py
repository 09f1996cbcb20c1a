"""``tidemill doctor``: check the store and its workers, and advise on each problem."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.brokers.contract.job_numbers import with_job_numbers
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.policies import with_policies
from tidemill.brokers.contract.schedules import LAST_DECLARATION
from tidemill.brokers.contract.store import Store
from tidemill.brokers.contract.unknown_tasks import MOST_COUNTED, with_unknown_tasks
from tidemill.cli.connect import app_option, json_option, open_mill, url_option
from tidemill.cli.disk_checks import Finding, space, writable
from tidemill.cli.version_checks import installed, migrated, remedy, same_versions
from tidemill.cli.worker_checks import clocks, leases
from tidemill.client.explain import serving
from tidemill.client.reading import users_queues
from tidemill.core.clock import clock
from tidemill.core.errors import CodecError, TidemillError
from tidemill.core.job import State
from tidemill.core.scoreboard import read_unkillable
from tidemill.schedules import record as kept

__all__ = ["Finding", "doctor", "examine"]

OLD = 300.0
"""Seconds after which a ready job counts as old."""

_SAMPLE = 50
_QUEUES_MOST = 10  # the most queues without a worker that the report lists
_UNKNOWN_MOST = 10  # the most unknown tasks that the report lists


@click.command()
@url_option
@app_option
@json_option
def doctor(url: str | None, app: str | None, as_json: bool) -> None:
    """Check the store, its disk, its clocks and its workers. Exit code 1 when something fails."""
    from tidemill.cli import console

    findings = [installed()]
    try:
        with open_mill(url, app) as mill:
            text = f"{mill.broker.url} opens, its format is known"
            findings.append(Finding("broker", "ok", text))
            findings += [*examine(mill), *_schedules(mill)]
    except TidemillError as error:
        problem = str(error).splitlines()[0]
        findings.append(Finding("broker", "fail", problem, remedy(problem)))
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
    """Run all checks on an open store, in order. A check that raises an error becomes a finding."""
    findings: list[Finding] = []
    checks: tuple[Callable[[Store], Iterator[Finding]], ...] = (
        *(_publishing, _durable, _asked_for, _policies),
    )
    if Feature.INSPECT in mill.broker.features:
        checks = (migrated, _granted, writable, _here, _durable, _cleaning, space, clocks)
        checks = (*checks, _workers, same_versions)
        checks = (*checks, _backlog, _limits, leases, _unknown, _carried)
    for check in checks:
        try:
            findings += check(mill.broker)
        except TidemillError as error:
            name = check.__name__.strip("_")
            findings.append(Finding(name, "fail", str(error), "the message names the problem"))
    return findings


def _schedules(mill: Tidemill) -> Iterator[Finding]:
    """Find schedules that lack a task or a worker, or whose next time is too far away."""
    if Feature.SCHEDULES not in mill.broker.features:
        return
    rows = [*mill.schedules]
    unknown = [f"{row.name} ({row.task})" for row in rows if row.known is False]
    undeclared = [row.name for row in rows if row.undeclared]
    far = _too_far(mill.broker)
    remove = "tidemill schedule remove NAME"
    set_back = "the clock was set back: a running worker sets the time within a minute"
    for names, problem, advice in (
        (unknown, "name a task the app does not have", remove),
        (undeclared, "do not fire, since no worker declares them any more", remove),
        (far, "have a next time that is later than their rule says", set_back),
    ):
        if names:
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            problem = f"{len(names)} of {len(rows)} {problem}: {shown}"
            yield Finding("schedules", "warn", problem, advice)
    if rows and not (unknown or undeclared or far):
        yield Finding("schedules", "ok", f"{len(rows)} in the store")


def _too_far(broker: Store) -> list[str]:
    """The names of schedules whose next time lies beyond their rule, since the clock went back."""
    found, after, now = list[str](), LAST_DECLARATION, broker.wall()
    while page := broker.list_schedules(after):
        after = page[-1].name
        for record in page:
            with contextlib.suppress(CodecError):  # another version wrote the record
                if kept.restored(record, now) is not None:
                    found.append(record.name)
    return found


def _publishing(broker: Store) -> Iterator[Finding]:
    """Check that a message broker accepts publishes, and measure the time of its answer."""
    before = time.monotonic()
    info = broker.info()
    took = (time.monotonic() - before) * 1000
    text = f"{info['server']} answered within {took:.0f} ms"
    if info["publishing"] == "open":
        yield Finding("server", "ok", text)
    else:
        advice = "puts are refused, work goes on: check memory and disk of the server"
        yield Finding("server", "fail", f"publishing is {info['publishing']}", advice)
    if info["failed"]:
        text = f"{info['failed']:,} failed jobs are kept"
        yield Finding("failed", "warn", text, "tidemill jobs --state failed, then retry or delete")


def _carried(broker: Store) -> Iterator[Finding]:
    """Check that the carrier (RabbitMQ) of a store accepts publishes, and has not lost its jobs."""
    info, rows = broker.info(), _queues(broker)
    carried, server = sum(row.carried for row in rows), info.get("carrier server")
    if server is None:
        return
    text = f"{server} has {info['carrier ready']:,} ready jobs, of {carried:,} that it was given"
    if info["carrier publishing"] != "open":
        advice = "puts go on, and wait in the store: check memory and disk of the server"
        problem = f"publishing is {info['carrier publishing']}"
        yield Finding("carrier", "fail", problem, advice)
    elif carried and not info["carrier ready"]:
        advice = "if this stays so, the server has lost the jobs: tidemill recall"
        yield Finding("carrier", "warn", text, advice)
    else:
        yield Finding("carrier", "ok", text)


def _asked_for(broker: Store) -> Iterator[Finding]:
    """Find queues of a message broker that have ready jobs and no consumers."""
    rows = _queues(broker)
    for row in rows:
        if row.ready and not row.consumers:
            text = f"queue {row.name} has {row.ready:,} ready jobs, and nobody asks for more"
            advice = "start a worker; if all workers are busy with long jobs, add slots"
            yield Finding("queues", "warn", text, advice)
    ready = sum(row.ready for row in rows)
    yield Finding("backlog", "ok", f"{ready:,} ready jobs in {len(rows):,} queues")


def _policies(broker: Store) -> Iterator[Finding]:
    """Find policies of the server that can destroy accepted jobs."""
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


def _queues(broker: Store) -> list[QueueStats]:
    return users_queues(broker.stats())


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
    """Check that the database user has all rights that calls need, also the calls after a crash."""
    lacking = broker.info().get("missing_grants")
    if lacking:
        text = f"this user lacks {'; '.join(lacking[:3])}" + (" …" if len(lacking) > 3 else "")
        advice = "run the SQL that tidemill migrate URL --grants ROLE prints, as the migrating user"
        yield Finding("grants", "fail", text, advice)
    elif lacking is not None:
        yield Finding("grants", "ok", "the user has all rights on the store")


def _cleaning(broker: Store) -> Iterator[Finding]:
    """Find old transactions that keep the server from removing deleted rows."""
    holders = broker.info().get("held_back_by")
    for text in holders or ():
        advice = (
            "end it: until then the server clears nothing away, and queues get slower "
            "(pg_terminate_backend, ROLLBACK PREPARED, pg_drop_replication_slot)"
        )
        yield Finding("cleaning", "warn", text, advice)
    if holders == []:
        yield Finding("cleaning", "ok", "no old transaction keeps deleted rows")


def _workers(broker: Store) -> Iterator[Finding]:
    from tidemill.cli import console

    owners = broker.owners()
    workers = [owner for owner in owners if owner.kind == "worker"]
    slots = sum(owner.concurrency for owner in workers)
    text = f"{len(workers)} alive with {slots} slots, {len(owners) - len(workers)} consumers"
    if workers or not any(row.size for row in _queues(broker)):
        yield Finding("workers", "ok", text)
    else:
        yield Finding("workers", "warn", text, "start one: tidemill worker MODULE:VAR")
    for owner in workers:  # a scoreboard on another machine cannot be read here
        for pid, since in read_unkillable(owner.board, owner.id) if owner.board else ():
            when = console.clock(since)
            text = f"process {pid} of {owner.name} still runs after SIGKILL, since {when}"
            advice = "its jobs stay held while a system call hangs: look for a dead mount or disk"
            yield Finding("workers", "warn", text, advice)


def _backlog(broker: Store) -> Iterator[Finding]:
    """Find jobs that no worker will take, and jobs that have been ready for long."""
    from tidemill.cli.console import span

    worst, where, rows, owners = 0.0, "", _queues(broker), broker.owners()
    problems: list[tuple[str, str]] = []
    for row in rows:
        if row.paused and row.ready:
            text = f"queue {row.name} is paused with {row.ready:,} ready jobs"
            problems.append((text, f"tidemill resume {row.name}"))
        elif row.ready and not serving(owners, row.name) and _has_tasks(broker, row.name):
            text = f"queue {row.name} has {row.ready:,} ready jobs and no worker"
            problems.append((text, _start(row.name)))
        age = clock.wall() - row.oldest if row.oldest else 0.0
        if age > worst and not row.paused:
            worst, where = age, row.name
    for text, advice in problems[:_QUEUES_MOST]:
        yield Finding("queues", "warn", text, advice)
    if len(problems) > _QUEUES_MOST:
        text = f"{len(problems) - _QUEUES_MOST:,} more queues are paused or have no worker"
        yield Finding("queues", "warn", text, "tidemill queues")
    ready = sum(row.ready for row in rows if not row.paused)
    text = f"{ready:,} ready jobs wait for limits" if ready else "no job is ready"
    text = f"the oldest ready job of {where} is {span(worst)} old" if where else text
    old = worst > OLD
    advice = f"add workers or slots; tidemill jobs --queue {where} --state ready" if old else ""
    yield Finding("backlog", "warn" if old else "ok", text, advice)


def _start(queue: str) -> str:
    """The advice to start a worker of a queue."""
    return f"start one: tidemill worker MODULE:VAR -Q {shlex.quote(queue)}"


def _unknown(broker: Store) -> Iterator[Finding]:
    """Find tasks that no worker has known so far: the jobs of these tasks wait."""
    if Feature.UNKNOWN not in broker.features:
        return
    from tidemill.cli.console import span

    tasks = with_unknown_tasks(broker, "doctor").unknown_tasks()
    for row in tasks[:_UNKNOWN_MOST]:
        most = " or more" if row.count >= MOST_COUNTED else ""
        queues = ", ".join(row.queues[:3]) + (" …" if len(row.queues) > 3 else "")
        problem = f"no worker knows task {row.task}: {row.count:,}{most} job(s) of queue {queues}"
        age = span(max(0.0, clock.wall() - row.oldest))
        text = f"{problem} are set aside, the oldest {age} old"
        advice = f"start a worker whose app has {row.task}, or tidemill cancel --task {row.task}"
        yield Finding("tasks", "warn", text, advice)
    if len(tasks) > _UNKNOWN_MOST:
        text = f"{len(tasks) - _UNKNOWN_MOST:,} more tasks have jobs set aside"
        yield Finding("tasks", "warn", text, "start workers whose apps have them")


def _limits(broker: Store) -> Iterator[Finding]:
    """Find queues whose limit lets no job start. Somebody may have set the limit by mistake."""
    if Feature.LIMITS not in broker.features:
        return
    ready = {row.name: row.ready for row in _queues(broker)}
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
    """True when a sample of the queue's ready jobs has a job of a task, not only messages."""
    if Feature.NAMED in broker.features:
        head = with_job_numbers(broker, "doctor").head(queue, State.READY, _SAMPLE)
        if head:  # it has no jobs that lie with a carrier
            return any(not record.envelope.is_message for record in head)
    ready = Filter(states=frozenset({State.READY}), queue=queue)
    return any(not r.envelope.is_message for r in broker.find(ready, _SAMPLE).records)
