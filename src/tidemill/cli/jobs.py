"""``tidemill jobs``, ``job`` and ``explain``: list jobs, show a job, explain its state."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.cli import console
from tidemill.cli.connect import store_options, with_default
from tidemill.cli.job_selection import failed_job, filter_options, whole_group, whole_id
from tidemill.client.compositions import end_of, size_of, steps_of
from tidemill.client.explain import Event, attempt_text, explain_in, serving, trail_of
from tidemill.client.queues import no_such_queue
from tidemill.core.clock import local_time, short_id
from tidemill.core.envelope import priority_of
from tidemill.core.job import DEFAULT_TTR, GROUP, Record, State
from tidemill.core.suggest import hint
from tidemill.core.words import counted
from tidemill.doctor import words
from tidemill.errors import CodecError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_RESULT_MOST = 2000
_STEPS_MOST = 10  # the most steps of a chain that have a line
_LINE_MOST = 10_000  # columns, so that no line is wrapped


@click.command()
@filter_options
@with_default("-n --limit", click.IntRange(1, 100_000), 20, "The most jobs that are listed.")
@click.option("--cursor", default="", help="Continue an earlier list from its end.")
@click.option("-v", "--verbose", is_flag=True, help="Also print the last traceback of each job.")
@store_options
def jobs(
    mill: Tidemill, what: Filter, limit: int, cursor: str, verbose: bool, as_json: bool
) -> None:
    """List jobs, newest first.

    Ids are shown by their last 8 characters, which every verb accepts; --json has full ids.
    """
    what = whole_group(mill, what)
    page = mill.jobs(what).page(limit=limit, cursor=cursor)

    if as_json:
        records = [record.public() for record in page.records]
        console.print_json({"jobs": records, "cursor": page.cursor or None})
        return
    out = console.console()
    rows = [
        (
            short_id(r.envelope.id),
            _state(r),
            r.envelope.queue,
            r.envelope.called or "(message)",
            console.ago(r.envelope.created),
            f"{r.current_attempt}/{r.max_attempts or '∞'}",
            r.latest_error or r.envelope.text,
        )
        for r in page.records
    ]
    if not rows:
        out.print(_none(mill, what))
        return
    columns = ("id…", "state", "queue?", "task…?", "age?", "runs?", "error or arguments…")
    out.print(console.table(out, columns, rows))
    if verbose:
        _print_tracebacks(out, page.records)
    if page.cursor:
        click.echo(f"more: the same with --cursor {page.cursor}", err=True)


def _none(mill: Tidemill, what: Filter) -> str:
    """The line in place of an empty table, with a hint if a name may be misspelt."""
    if what == Filter():
        return f"no jobs in {mill.broker.url}"
    queues = [row.name for row in mill.queues()]
    if what.queue and what.queue not in queues:
        return f"no jobs match; {no_such_queue(what.queue, queues)}"
    if what.task and mill.tasks and what.task not in mill.tasks:
        return f"no jobs match; the app has no task {what.task!r}; {hint(what.task, mill.tasks)}"
    return "no jobs match"


def _state(record: Record) -> Text:
    text, progress = console.styled(str(record.state)), record.progress
    if record.state is State.RUNNING and progress and progress[1]:
        text.append(f" {progress[0] / progress[1]:.0%}")
    return text


def _print_tracebacks(out: Console, records: list[Record]) -> None:
    seen: dict[str, str] = {}
    for record in records:
        trace = next((a.traceback for a in reversed(record.attempts) if a.traceback), "")
        if trace:
            job_id = short_id(record.envelope.id)
            out.print(f"\n{job_id}  {console.clean(record.latest_error, one_line=True)}")
            _print_traceback(out, trace, job_id, seen)


def _print_traceback(out: Console, trace: str, name: str, seen: dict[str, str]) -> None:
    """Print a traceback, or only the name of an earlier traceback with the same lines of code."""
    from rich.text import Text

    frames = "".join(line for line in trace.splitlines() if line.startswith('  File "'))
    first = seen.setdefault(frames, name)
    is_same = bool(frames) and first != name
    text = f"same as {first}" if is_same else console.clean(trace).rstrip()
    for line in text.splitlines():
        out.print(Text(f"    {line}", style="dim"))


@click.command()
@click.argument("id")
@store_options
def job(mill: Tidemill, id: str, as_json: bool) -> None:
    """Show one job: its settings, its events in order, its result.

    A beginning or an ending of the id is enough, if no other id has it.
    """
    record = _read(mill, id)
    if as_json:
        result, readable = _result(record)
        trail = [
            {"time": e.time or None, "what": e.what, "detail": e.detail, "traceback": e.traceback}
            for e in trail_of(record)
        ]
        answer = {"result": console.plain(result), "result_readable": readable, "trail": trail}
        answer["members"] = _members(mill, record)
        steps = steps_of(mill.runtime, record).values()
        answer["steps"] = [step.for_list().public() for step in steps] or None
        console.print_json(record.public() | answer)
        return
    _print_job(console.console(), mill, record)


def _print_job(out: Console, mill: Tidemill, record: Record) -> None:
    for name, value in [*_facts(record), *_counts(mill, record), *_steps(mill, record)]:
        out.print(f"{name:<9} {console.clean(value, one_line=True)}")
    out.print()
    _print_trail(out, record)
    if record.state is State.SUCCEEDED:
        result, readable = _result(record)
        text = console.clean(repr(result)) if readable else "(cannot be decoded here)"
        cut = len(text) - _RESULT_MOST
        rest = f"… ({cut:,} more characters; --json shows all)" if cut > 0 else ""
        out.print(f"\nresult    {text[:_RESULT_MOST]}{rest}")
    elif not record.state.finished:
        out.print(f"\n{explain_in(mill.broker, record)}")


def job_lines(mill: Tidemill, id: str) -> list[str]:
    """The output of ``tidemill job``, as lines without colors. Raises JobNotFound."""
    from rich.console import Console

    file = io.StringIO()
    out = Console(file=file, width=_LINE_MOST, markup=False, highlight=False, emoji=False)
    _print_job(out, mill, _read(mill, id))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def _read(mill: Tidemill, text: str) -> Record:
    """The record of a job. Some brokers show failed jobs only."""
    if Feature.INSPECT not in mill.broker.features:
        return failed_job(mill, text)
    return mill.job(whole_id(mill, text)).refresh()


def _facts(record: Record) -> list[tuple[str, str]]:
    """The lines above the events, in order, without empty values."""
    e = record.envelope
    facts = [
        ("job", e.id),
        ("task", f"{e.task}({e.text})" if e.task else "(message)"),
        ("state", f"{record.state}{', asked to cancel' if record.cancelling else ''}"),
        ("queue", f"{e.queue}, priority {priority_of(record.rank):g}"),
        ("attempts", _attempts(record)),
        ("times", f"{local_time(e.created):%Z, UTC%z}"),
        ("losses", f"{record.losses} (its worker vanished)" if record.losses else ""),
        (
            "schedule",
            f"{e.planned.schedule}, for {console.clock(e.planned.time)}" if e.planned else "",
        ),
        ("timeout", f"{e.timeout:g} s" if e.timeout else ""),
        ("ttr", _ttr(record)),
        ("key", e.key),
        ("tags", ", ".join(e.tags)),
        ("headers", ", ".join(f"{name}={value}" for name, value in e.headers.items())),
    ]
    if record.progress:
        done, total = record.progress
        share = f" of {total:,} ({done / total:.0%})" if total else ""
        text = f", {record.progress_text}" if record.progress_text else ""
        facts.append(("progress", f"{done:,}{share}{text}"))
    return [(name, value) for name, value in facts if value]


def _attempts(record: Record) -> str:
    if record.current_attempt:
        return attempt_text(record, record.run, record.current_attempt)
    most = f" of {record.max_attempts}" if record.max_attempts else ""
    return f"{f'run {record.run}, ' if record.run > 1 else ''}none{most} yet"


def _ttr(record: Record) -> str:
    ttr = record.envelope.ttr
    if not record.envelope.is_message:
        return ""
    return f"{ttr if ttr > 0 else DEFAULT_TTR:g} s" if ttr else "0: handed out at most once"


def _members(mill: Tidemill, record: Record) -> dict[str, int | None] | None:
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
        text = "still being put, or their producer died; to end the group: tidemill cancel"
        return [("members", f"{text} {record.envelope.id}")]
    failed = f", {record.failures:,} of them without success" if record.failures else ""
    return [("members", f"{members['ended']:,} of {members['count']:,} have ended{failed}")]


def _steps(mill: Tidemill, record: Record) -> list[tuple[str, str]]:
    """A line for the chain, and a line for each of the first steps without success."""
    steps = steps_of(mill.runtime, record)
    if not steps:
        return []
    count, states = 1 + max(steps), Counter(str(step.state) for step in steps.values())
    states["no longer kept"] = count - len(steps)
    text = ", ".join(f"{number:,} {state}" for state, number in states.items() if number)
    end = end_of(mill.broker, record, (f"{record.envelope.id}.",))
    lines = [("chain", f"{end.state}; {counted(count, 'step')}: {text}")]
    for number, step in steps.items():
        if step.state is not State.SUCCEEDED:
            what = f"{step.envelope.task}({step.envelope.text})  {step.latest_error}"
            lines.append((f"step {number + 1}", f"{step.state:<9} {step.envelope.id}  {what}"))
    return lines[: 1 + _STEPS_MOST]


def _print_trail(out: Console, record: Record) -> None:
    """Print the events; attempts that failed at the same lines of code share a traceback."""
    last, attempt, seen = 0.0, "", dict[str, str]()
    for event in trail_of(record):
        _print_event(out, event, last)
        last, attempt = event.time or last, event.detail if event.what == "started" else attempt
        if event.traceback:
            _print_traceback(out, event.traceback, attempt, seen)


def _print_event(out: Console, event: Event, last: float) -> None:
    from rich.text import Text

    gap = f"+{words.duration(max(0.0, event.time - last))}" if last and event.time else ""
    line = Text()
    line.append(f"{console.clock(event.time):<23} {gap:>10}  ", style="dim")
    line.append(console.clean(event.what), style=console.style_of(event.what.split(",")[0]))
    if event.detail:
        line.append("  " + console.clean(event.detail))
    out.print(line)


def _result(record: Record) -> tuple[Any, bool]:
    """(result, True), or (None, False) when the result is missing or cannot be decoded."""
    if record.state is not State.SUCCEEDED:
        return None, False
    try:
        return record.result, True
    except CodecError:
        return None, False


@click.command()
@click.argument("id")
@store_options
def explain(mill: Tidemill, id: str, as_json: bool) -> None:
    """Explain in one sentence why a job is in its state.

    A beginning or an ending of the id is enough, if no other id has it.
    """
    record = _read(mill, id)
    sentence = explain_in(mill.broker, record)
    if as_json:
        workers = [owner.name for owner in serving(mill.broker.owners(), record.envelope.queue)]
        document = {"id": record.envelope.id, "state": str(record.state)}
        console.print_json(document | {"explanation": sentence, "workers": workers})
    else:
        console.console().print(console.clean(sentence))
