"""``tidemill retry``, ``cancel``, ``alter`` and ``delete``: act on jobs, by id or by filter."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.cli import console
from tidemill.cli.connect import audit, store_options
from tidemill.cli.job_selection import every, filter_options, whole_group, whole_id
from tidemill.client import compositions
from tidemill.client.explain import why_not_altered, why_not_run
from tidemill.core.config import check_alter
from tidemill.core.job import GROUP, WAITING_STATES, Record, State
from tidemill.core.words import counted

_Do = Callable[..., list[bool]]  # acts on the jobs of these ids

_BATCH = 500
_RETRIED = frozenset({State.FAILED})
_CANCELLED = frozenset({State.WAITING, State.SCHEDULED, State.READY, State.RUNNING})

_all_option = click.option(
    "--all", "everything", is_flag=True, help="Act on all matching jobs without a question."
)


@click.command()
@click.argument("ids", nargs=-1)
@filter_options
@click.option(
    "--force",
    is_flag=True,
    help="Also retry succeeded jobs, and jobs whose key belongs to a succeeded job.",
)
@_all_option
@store_options
def retry(
    mill: Tidemill, ids: tuple[str, ...], what: Filter, force: bool, everything: bool, as_json: bool
) -> None:
    """Retry jobs: start a new run of each, with all its attempts.

    Select jobs by id, by the beginning or ending of an id, or by filters. Filters select failed
    jobs, unless you pass --state cancelled, expired or scheduled. The id of a group selects its
    members that did not succeed, and the id of a chain its steps.
    """
    chosen = _chosen(mill, ids, what, _RETRIED, "retry", everything)
    if force and ids:
        _refuse_force(mill, chosen)

    do = functools.partial(compositions.retry_jobs, mill.runtime, force=force)
    _act("retried", chosen, do, mill, as_json, functools.partial(why_not_run, mill.runtime))


@click.command()
@click.argument("ids", nargs=-1)
@filter_options
@click.option("--terminate", is_flag=True, help="Stop running jobs within a second.")
@_all_option
@store_options
def cancel(
    mill: Tidemill,
    ids: tuple[str, ...],
    what: Filter,
    terminate: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """Cancel jobs that have not finished.

    Select jobs by id, by the beginning or ending of an id, or by filters. A job that has not
    started never starts. A running job is asked to stop; --terminate stops it. The id of a group or
    a chain selects all its jobs.
    """
    chosen = _chosen(mill, ids, what, _CANCELLED, "cancel", everything)
    by_id: _Do = functools.partial(compositions.cancel_jobs, mill.runtime)
    do = functools.partial(by_id if ids else mill.broker.cancel, terminate=terminate)
    _act("cancelled", chosen, do, mill, as_json)


@click.command()
@click.argument("ids", nargs=-1)
@filter_options
@click.option("--to-priority", "priority", type=float, help="The new priority, -100 to 100.")
@click.option("--to-queue", "target", metavar="QUEUE", help="The queue to move the jobs to.")
@_all_option
@store_options
def alter(
    mill: Tidemill,
    ids: tuple[str, ...],
    what: Filter,
    priority: float | None,
    target: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Give jobs that wait another priority or another queue.

    Select jobs by id, by the beginning or ending of an id, or by filters. A job waits while it is
    ready, scheduled or waiting for another job; a job that runs is refused. A job keeps its place
    in the order of acceptance. The id of a group or a chain selects all its jobs.
    """
    rank, target = check_alter(priority, target)
    mill.runtime.features.need(Feature.ALTER, "alter")
    chosen = _chosen(mill, ids, what, WAITING_STATES, "alter", everything)
    by_id: _Do = functools.partial(compositions.alter_jobs, mill.runtime)
    do = functools.partial(by_id if ids else mill.broker.alter, rank=rank, queue=target)
    _act("altered", chosen, do, mill, as_json, lambda record: why_not_altered(record, target))


@click.command()
@click.argument("ids", nargs=-1)
@filter_options
@_all_option
@store_options
def delete(
    mill: Tidemill, ids: tuple[str, ...], what: Filter, everything: bool, as_json: bool
) -> None:
    """Delete jobs in any state, with their results.

    Select jobs by id, by the beginning or ending of an id, or by filters. A running job loses its
    lease. The id of a group or a chain selects its members or steps, and its hooks.
    """
    chosen = _chosen(mill, ids, what, frozenset(), "delete", everything)
    by_id: _Do = functools.partial(compositions.delete_jobs, mill.runtime)
    _act("deleted", chosen, by_id if ids else mill.broker.delete, mill, as_json)


def _refuse_force(mill: Tidemill, ids: Sequence[str]) -> None:
    """Refuse ``--force`` for a group, before any job is retried."""
    if Feature.FLOWS not in mill.broker.features:
        return
    for job_id in ids:
        record = mill.broker.get(job_id)
        if record is not None and record.envelope.task == GROUP:
            raise click.UsageError(
                f"--force never repeats members of a group that succeeded; drop it for {job_id}"
            )


def _chosen(
    mill: Tidemill,
    ids: tuple[str, ...],
    what: Filter,
    states: frozenset[State],
    verb: str,
    everything: bool,
) -> list[str]:
    """The selected ids. The user confirms a selection by filters."""
    filtered = what != Filter()
    if ids and (filtered or everything):
        raise click.UsageError("give either ids or filters, not both")
    if ids:
        return list(dict.fromkeys(whole_id(mill, job_id) for job_id in ids))
    if not filtered and not everything:
        raise click.UsageError(f"name the jobs to {verb}: ids, filters such as --queue, or --all")
    if not what.states:
        what = msgspec.structs.replace(what, states=states)
    what = whole_group(mill, what)
    records = every(mill, what)
    found = [r.envelope.id for r in records if not states or not _follows(mill, r, what, verb)]
    if found and not everything:
        change = f"{verb} {counted(len(found), 'job')}"
        if not sys.stdin.isatty():
            raise click.UsageError(f"this would {change}; to go on add --all")
        if not click.confirm(f"{change}?", err=True):
            raise click.Abort
    return found


def _follows(mill: Tidemill, record: Record, what: Filter, verb: str) -> bool:
    """True for a group or a hook that the verb leaves out."""
    # A filter by group selects only members. A group never runs. A group ends with its members,
    # except when its producer died before all members were stored.
    is_group = record.envelope.task == GROUP
    if what.id_prefix:
        return is_group or compositions.is_hook(record)
    return is_group and (verb == "retry" or not compositions.lacks_members(mill.runtime, record))


def _why_not_ended(record: Record) -> str:
    ended = record.state in (State.SUCCEEDED, State.FAILED, State.EXPIRED)
    return f"it {record.state} already" if ended else f"it is {record.state}"


def _act(
    done_word: str,
    ids: Sequence[str],
    do: Callable[[Sequence[str]], list[bool]],
    mill: Tidemill,
    as_json: bool,
    why_not: Callable[[Record], str] = _why_not_ended,
) -> None:
    """Act in batches and print a reason for each refused job. Exit code 1 if any was refused."""
    done: list[str] = []
    refused: list[dict[str, str]] = []
    failed = Filter(states=_RETRIED)
    listed = functools.cache(lambda: frozenset(r.envelope.id for r in every(mill, failed)))
    try:
        for start in range(0, len(ids), _BATCH):
            part = ids[start : start + _BATCH]
            for job_id, answer in zip(part, do(part), strict=True):
                if answer:
                    done.append(job_id)
                else:
                    reason = _why_not(mill, job_id, listed, why_not)
                    refused.append({"id": job_id, "reason": reason})
    finally:
        if done:
            audit(mill.broker, f"{done_word} jobs", ", ".join(done[:5]), len(done))
    if as_json:
        console.print_json({done_word: done, "refused": refused})
    else:
        click.echo(f"{done_word} {counted(len(done), 'job')}")
        for row in itertools.islice(refused, 20):
            click.echo(f"not {row['id']}: {row['reason']}", err=True)
        if len(refused) > 20:
            click.echo(f"refused {counted(len(refused) - 20, 'more job')}", err=True)
    if refused:
        sys.exit(1)


def _why_not(
    mill: Tidemill,
    job_id: str,
    listed: Callable[[], frozenset[str]],
    why_not: Callable[[Record], str],
) -> str:
    if Feature.INSPECT not in mill.broker.features:
        if job_id in listed():
            return "it is no job, and its queue is unknown; tidemill delete removes it"
        return "no failed job has this id; list failed jobs with: tidemill jobs --state failed"
    record = mill.broker.get(job_id)
    if record is None:
        return "no job has this id here; find it with: tidemill jobs --search TEXT"
    return why_not(record)
