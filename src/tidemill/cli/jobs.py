"""``tidemill jobs``, ``job`` and ``explain``: looking at jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tidemill.app import Tidemill
from tidemill.brokers.base import Feature, Filter
from tidemill.cli.choose import failed_job, filter_options, whole_group, whole_id
from tidemill.cli.connect import json_option, store_options
from tidemill.codec import unpack
from tidemill.errors import CodecError
from tidemill.inputs import size_of
from tidemill.job import DEFAULT_TTR, GROUP, Planned, Record, State, priority_of
from tidemill.trail import Event, attempt_text, explain_in, serving, trail_of
from tidemill.trail import explain as told_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["explain", "job", "jobs"]

_RESULT_MOST = 2000


@click.command()
@filter_options
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True)
@click.option("--cursor", default="", help="Go on where an earlier list ended.")
@json_option
@store_options
def jobs(mill: Tidemill, what: Filter, limit: int, cursor: str, as_json: bool) -> None:
    """List jobs, newest first."""
    what = whole_group(mill, what)
    page = mill.find(what, limit=limit, cursor=cursor)
    from tidemill.cli import show

    if as_json:
        records = [record.public() for record in page.records]
        show.print_json({"jobs": records, "cursor": page.cursor or None})
        return
    out = show.console()
    rows = [
        (
            r.envelope.id,
            show.styled(str(r.state)),
            r.envelope.queue,
            r.envelope.task or "(message)",
            show.ago(r.envelope.created),
            f"{r.attempt}/{r.max_attempts or '∞'}",
            r.error or _last_error(r) or r.envelope.text,
        )
        for r in page.records
    ]
    if not rows:
        out.print("no jobs" + (" match" if what != Filter() else f" in {mill.broker.url}"))
        return
    columns = ("id", "state", "queue?", "task…?", "age?", "runs?", "error or arguments…")
    out.print(show.table(out, columns, rows))
    if page.cursor:
        click.echo(f"more: the same with --cursor {page.cursor}", err=True)


def _last_error(record: Record) -> str:
    return record.attempts[-1].error if record.attempts else ""


@click.command()
@click.argument("id")
@json_option
@store_options
def job(mill: Tidemill, id: str, as_json: bool) -> None:
    """Show one job: all that happened to it, in order, and its result.

    The beginning of its id is enough, where no other id begins so.
    """
    from tidemill.cli import show

    record = _read(mill, id)
    result, readable = _result(record)
    if as_json:
        trail = [
            {"time": e.time or None, "what": e.what, "detail": e.detail, "traceback": e.traceback}
            for e in trail_of(record)
        ]
        answer = {"result": show.plain(result), "result_readable": readable, "trail": trail}
        answer["members"] = _members(mill, record)
        show.print_json(record.public() | answer)
        return
    out = show.console()
    for name, value in [*_facts(record), *_counts(mill, record)]:
        out.print(f"{name:<9} {show.clean(value, one_line=True)}")
    out.print()
    last = 0.0
    for event in trail_of(record):
        _print_event(out, event, last)
        last = event.time or last
    if record.state is State.SUCCEEDED:
        text = show.clean(repr(result)) if readable else "(cannot be decoded here)"
        cut = len(text) - _RESULT_MOST
        rest = f"… ({cut:,} more characters; --json shows all)" if cut > 0 else ""
        out.print(f"\nresult    {text[:_RESULT_MOST]}{rest}")
    elif not record.state.finished:
        out.print(f"\n{explain_in(mill.broker, record)}")


def _read(mill: Tidemill, text: str) -> Record:
    """The record of a job; of a broker that shows failed jobs only, one of those.

    Raises:
        JobNotFound: there is no such job.
        InvalidOption: several jobs have ids that begin so.
    """
    return mill.job(whole_id(mill, text)).refresh() if _inspects(mill) else failed_job(mill, text)


def _inspects(mill: Tidemill) -> bool:
    return Feature.INSPECT in mill.broker.features


def _explained(mill: Tidemill, record: Record) -> str:
    if _inspects(mill):
        return explain_in(mill.broker, record)
    return told_of(record, paused=False, workers=0)


def _facts(record: Record) -> list[tuple[str, str]]:
    """What the head of the page says, in order; only what there is."""
    e = record.envelope
    facts = [
        ("job", e.id),
        ("task", f"{e.task}({e.text})" if e.task else "(message)"),
        ("state", f"{record.state}{_aside(record)}"),
        ("queue", f"{e.queue}, priority {priority_of(record.rank):g}"),
        ("attempts", _attempts(record)),
        ("losses", f"{record.losses} (its worker vanished)" if record.losses else ""),
        ("schedule", f"{e.planned.schedule}, for {_moment(e.planned)}" if e.planned else ""),
        ("timeout", f"{e.timeout:g} s" if e.timeout else ""),
        ("ttr", _ttr(record)),
        ("key", e.key),
        ("tags", ", ".join(e.tags)),
        ("headers", ", ".join(f"{name}={value}" for name, value in e.headers.items())),
    ]
    if record.progress:
        done, total = record.progress
        share = f" of {total:g} ({done / total:.0%})" if total else ""
        facts.append(("progress", f"{done:g}{share}"))
    return [(name, value) for name, value in facts if value]


def _aside(record: Record) -> str:
    """Return the remark beside the state."""
    if record.cancelling:
        return ", asked to cancel"
    return ", set aside: no worker knows its task" if record.unknown else ""


def _attempts(record: Record) -> str:
    """How many attempts of its current run a job has used: ``run 2, attempt 1 of 4``."""
    if record.attempt:
        return attempt_text(record, record.run, record.attempt)
    most = f" of {record.max_attempts}" if record.max_attempts else ""
    return f"{f'run {record.run}, ' if record.run > 1 else ''}none{most} yet"


def _ttr(record: Record) -> str:
    """How long a consumer has for a message."""
    ttr = record.envelope.ttr
    if not record.envelope.is_message:
        return ""
    return f"{ttr if ttr > 0 else DEFAULT_TTR:g} s" if ttr else "0: handed out at most once"


def _members(mill: Tidemill, record: Record) -> dict[str, int | None] | None:
    """Of a group: how many members there are, have ended, and did not succeed."""
    if record.envelope.task != GROUP:
        return None
    count = size_of(mill.broker, record)
    ended = None if count is None else max(0, count - record.pending)
    return {"count": count, "ended": ended, "failures": record.failures}


def _counts(mill: Tidemill, record: Record) -> list[tuple[str, str]]:
    members = _members(mill, record)
    if members is None:
        return []
    if members["count"] is None:
        text = "still being put, or who put them died; to end it: tidemill cancel"
        return [("members", f"{text} {record.envelope.id}")]
    failed = f", {record.failures:,} of them not well" if record.failures else ""
    return [("members", f"{members['ended']:,} of {members['count']:,} have ended{failed}")]


def _moment(planned: Planned) -> str:
    from tidemill.cli.show import clock

    return clock(planned.time)


def _print_event(out: Console, event: Event, last: float) -> None:
    from rich.text import Text

    from tidemill.cli import show

    gap = f"+{show.span(max(0.0, event.time - last))}" if last and event.time else ""
    line = Text()
    line.append(f"{show.clock(event.time):<23} {gap:>10}  ", style="dim")
    line.append(show.clean(event.what), style=show.style_of(event.what.split(",")[0]))
    if event.detail:
        line.append("  " + show.clean(event.detail))
    out.print(line)
    for part in show.clean(event.traceback).rstrip().splitlines():
        out.print(Text(f"    {part}", style="dim"))


def _result(record: Record) -> tuple[Any, bool]:
    """(result, True), or (None, False) when there is none or it cannot be decoded."""
    if record.state is not State.SUCCEEDED:
        return None, False
    try:
        return (unpack(record.result) if record.result else None), True
    except CodecError:
        return None, False


@click.command()
@click.argument("id")
@json_option
@store_options
def explain(mill: Tidemill, id: str, as_json: bool) -> None:
    """Say in one sentence why a job is where it is.

    The beginning of its id is enough, where no other id begins so.
    """
    from tidemill.cli import show

    record = _read(mill, id)
    sentence = _explained(mill, record)
    if as_json:
        workers = [owner.name for owner in serving(mill.broker, record.envelope.queue)]
        document = {"id": record.envelope.id, "state": str(record.state)}
        show.print_json(document | {"explanation": sentence, "workers": workers})
    else:
        show.console().print(show.clean(sentence))
