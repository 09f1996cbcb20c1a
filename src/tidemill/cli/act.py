"""``tidemill retry``, ``cancel`` and ``delete``: acting on jobs, by id or by filter."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.base import Feature, Filter
from tidemill.cli.choose import every, filter_options, whole_group, whole_id
from tidemill.cli.connect import json_option, store_options
from tidemill.groups import JobGroup
from tidemill.job import GROUP, Record, State
from tidemill.trail import why_not_run
from tidemill.wholes import cancel_whole, delete_whole, is_hook

__all__ = ["cancel", "delete", "retry"]

_BATCH = 500
_HOOKS_MOST = 3  # that a job may have
_RETRIED = frozenset({State.FAILED})
_CANCELLED = frozenset({State.WAITING, State.SCHEDULED, State.READY, State.RUNNING})

_all_option = click.option(
    "--all", "everything", is_flag=True, help="All that match the filters, without asking."
)


@click.command()
@click.argument("ids", nargs=-1)
@filter_options
@click.option(
    "--force", is_flag=True, help="Also jobs that succeeded, and whose key is held by a success."
)
@_all_option
@json_option
@store_options
def retry(
    mill: Tidemill,
    ids: tuple[str, ...],
    what: Filter,
    force: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """Make jobs ready again, as a new run with all their attempts.

    By id, or the beginning of one, or by filters, which then mean failed jobs unless --state says
    cancelled, expired or scheduled. The id of a group means its members that did not succeed.
    """
    chosen = _chosen(mill, ids, what, _RETRIED, "retry", everything)
    if force and ids:
        _refuse_force(mill, chosen)

    def do(part: Sequence[str]) -> list[bool]:
        return mill.broker.kick(part, force=force)

    by_id = _with_groups(mill, do, lambda group: group.retry())
    _act("retried", chosen, by_id if ids else do, mill, as_json)


@click.command()
@click.argument("ids", nargs=-1)
@filter_options
@click.option("--terminate", is_flag=True, help="Stop running jobs within a second.")
@_all_option
@json_option
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

    By id, or the beginning of one, or by filters. One that does not run yet never will; a running
    one is asked to stop, or made to with --terminate. The id of a group or a chain means all of it.
    """
    chosen = _chosen(mill, ids, what, _CANCELLED, "cancel", everything)

    def do(part: Sequence[str]) -> list[bool]:
        return mill.broker.cancel(part, terminate=terminate)

    by_id = _with_groups(
        mill,
        do,
        lambda group: group.cancel(terminate),
        lambda whole: cancel_whole(mill, whole, terminate),
    )
    _act("cancelled", chosen, by_id if ids else do, mill, as_json)


@click.command()
@click.argument("ids", nargs=-1)
@filter_options
@_all_option
@json_option
@store_options
def delete(
    mill: Tidemill, ids: tuple[str, ...], what: Filter, everything: bool, as_json: bool
) -> None:
    """Forget jobs, with their results, in whatever state.

    By id, or the beginning of one, or by filters. One that runs loses its lease. Of a group or a
    chain its id alone means all of it: its members or steps, and its hooks, too.
    """
    chosen = _chosen(mill, ids, what, frozenset(), "delete", everything)

    by_id = _with_groups(
        mill,
        mill.broker.delete,
        lambda group: group.delete(),
        lambda whole: delete_whole(mill, whole),
    )
    _act("deleted", chosen, by_id if ids else mill.broker.delete, mill, as_json)


def _with_groups(
    mill: Tidemill,
    do: Callable[[Sequence[str]], list[bool]],
    do_group: Callable[[JobGroup[Any]], int],
    do_chain: Callable[[str], int] | None = None,
) -> Callable[[Sequence[str]], list[bool]]:
    """An act on jobs that were given by id, where that of a group, or a chain, means all of it.

    A chain has the id of its last step.
    """

    if Feature.FLOWS not in mill.broker.features:
        return do

    def each(ids: Sequence[str]) -> list[bool]:
        answers = []
        for job_id in ids:
            record = mill.broker.get(job_id)
            if record is not None and record.envelope.task == GROUP:
                answers.append(bool(do_group(mill.group(job_id))))
            elif do_chain is not None and _has_steps(mill, job_id):
                answers.append(bool(do_chain(job_id)))
            else:
                answers += do([job_id])
        return answers

    return each


def _refuse_force(mill: Tidemill, ids: Sequence[str]) -> None:
    """Refuse ``--force`` for a group, before any job is retried."""
    if Feature.FLOWS not in mill.broker.features:
        return
    for job_id in ids:
        record = mill.broker.get(job_id)
        if record is not None and record.envelope.task == GROUP:
            raise click.UsageError(
                f"--force runs no member of a group again that succeeded; retry {job_id} without it"
            )


def _has_steps(mill: Tidemill, job_id: str) -> bool:
    """Whether other jobs than hooks are parts of a whole of this id."""
    parts = mill.broker.find(Filter(id_prefix=f"{job_id}."), _HOOKS_MOST + 1).records
    return any(not is_hook(record) for record in parts)


def _chosen(
    mill: Tidemill,
    ids: tuple[str, ...],
    what: Filter,
    states: frozenset[State],
    verb: str,
    everything: bool,
) -> list[str]:
    """The ids meant, once the person has agreed where a filter chose them."""
    filtered = what != Filter()
    if ids and (filtered or everything):
        raise click.UsageError("give either ids or filters, not both")
    if ids:
        return list(dict.fromkeys(whole_id(mill, job_id) for job_id in ids))
    if not filtered and not everything:
        raise click.UsageError(f"say which jobs to {verb}: ids, filters such as --queue, or --all")
    if not what.states:
        what = msgspec.structs.replace(what, states=states)
    what = whole_group(mill, what)
    # Of a group the work is meant; what comes of it follows from that, unless all is to go.
    found = [r.envelope.id for r in every(mill, what) if not states or not _follows(r, what)]
    if found and not everything:
        if not sys.stdin.isatty():
            raise click.UsageError(f"{len(found):,} jobs match; to {verb} them all add --all")
        if not click.confirm(f"{verb} {len(found):,} jobs?", err=True):
            raise click.Abort
    return found


def _follows(record: Record, what: Filter) -> bool:
    return bool(what.id_prefix) and (record.envelope.task == GROUP or is_hook(record))


def _act(
    done_word: str,
    ids: Sequence[str],
    do: Callable[[Sequence[str]], list[bool]],
    mill: Tidemill,
    as_json: bool,
) -> None:
    """Do it in batches, and say for each that was refused why. Exit code 1 when any was."""
    done: list[str] = []
    refused: list[dict[str, str]] = []
    failed = Filter(states=_RETRIED)
    listed = functools.cache(lambda: frozenset(r.envelope.id for r in every(mill, failed)))
    for start in range(0, len(ids), _BATCH):
        part = ids[start : start + _BATCH]
        for job_id, answer in zip(part, do(part), strict=True):
            if answer:
                done.append(job_id)
            else:
                reason = _why_not(mill, job_id, listed, retried=done_word == "retried")
                refused.append({"id": job_id, "reason": reason})
    if as_json:
        from tidemill.cli.show import print_json

        print_json({done_word: done, "refused": refused})
    else:
        click.echo(f"{done_word} {len(done):,} job{'' if len(done) == 1 else 's'}")
        for row in itertools.islice(refused, 20):
            click.echo(f"not {row['id']}: {row['reason']}", err=True)
        if len(refused) > 20:
            click.echo(f"nor {len(refused) - 20:,} more", err=True)
    if refused:
        sys.exit(1)


def _why_not(
    mill: Tidemill, job_id: str, listed: Callable[[], frozenset[str]], *, retried: bool
) -> str:
    if Feature.INSPECT not in mill.broker.features:
        if job_id in listed():
            return "it is no job, and nobody knows its queue; tidemill delete takes it away"
        return "nothing that failed has this id; tidemill jobs --state failed lists it"
    record = mill.broker.get(job_id)
    if record is None:
        return "no job has this id here; find it with: tidemill jobs --search TEXT"
    if retried:
        return why_not_run(record)
    ended = record.state in (State.SUCCEEDED, State.FAILED, State.EXPIRED)
    return f"it {record.state} already" if ended else f"it is {record.state}"
