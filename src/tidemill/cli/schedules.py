"""``tidemill schedule``: list, add and change schedules."""

from __future__ import annotations

import datetime as dt
import functools
import math
from collections.abc import Callable
from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.cli import console
from tidemill.cli.connect import (
    app_option,
    app_with,
    audit,
    json_option,
    open_mill,
    store_options,
    url_option,
)
from tidemill.cli.enqueue import argument, keyword
from tidemill.core.clock import clock
from tidemill.core.config import number_or_text
from tidemill.errors import InvalidOption
from tidemill.schedules.declare import Schedule
from tidemill.schedules.parse import When
from tidemill.schedules.rules import times

Verb = Callable[..., Any]


@click.group()
def schedule() -> None:
    """List, add and change schedules.

    Workers fire schedules, each time exactly once. Schedules in code are stored when a worker
    starts.
    """


@schedule.command("list")
@store_options
def list_(mill: Tidemill, as_json: bool) -> None:
    """List schedules; with --app, mark schedules whose task neither the app nor a worker has."""
    rows = [*mill.schedules]
    columns = ("schedule", "when", "next", "task…", "fired#?", "last?", "from?", "note")
    cells = [
        (
            *(row.name, row.when, _shown(row.next), f"{row.task}({row.arguments})"),
            *(f"{row.fired:,}", _ago(row.last), (row.app or "code") if row.code else ""),
            _note(row),
        )
        for row in rows
    ]
    document = {"schedules": [row.public() for row in rows]}
    console.answer_table(document, as_json, columns, cells, f"no schedules in {mill.broker.url}")


def _note(row: Schedule) -> Any:
    if row.undeclared:
        return console.styled(f"not declared since {_shown(row.undeclared)}")
    if row.known is False:
        return console.styled("unknown task")
    if row.paused or row.ended:
        return console.styled("paused" if row.paused else "ended")
    if row.declared is False:
        return console.styled("no worker declares it")
    return f"{row.repeats - row.fired:,} left" if row.repeats else ""


def _shown(moment: dt.datetime | None) -> str:
    """A time in the zone of its schedule."""
    return moment.isoformat(" ", "seconds") if moment else "-"


def _ago(moment: dt.datetime | None) -> str:
    return console.ago(moment.timestamp()) if moment else "-"


def _moment_of(text: str) -> Any:
    try:
        return dt.datetime.fromisoformat(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InvalidOption(f"{text!r} is no time; write a time as 2027-01-31T09:00") from None


def when_options(function: Verb) -> Verb:
    """Give a verb the options of a time rule. The verb gets the given options as ``when``."""

    @click.option(
        "--cron", metavar="TEXT", help="A cron rule: five fields, or six with seconds first."
    )
    @click.option(
        "--every", metavar="STEP", help="A step: seconds, or as '15 minutes', '3 months'."
    )
    @click.option("--at", metavar="TIME", help="A single time, as 2027-01-31T09:00 in --zone.")
    @click.option("--zone", metavar="ZONE", help="A time zone, as Europe/Berlin; default UTC.")
    @click.option("--start", metavar="TIME", help="The earliest time, from which --every counts.")
    @click.option("--end", metavar="TIME", help="The latest time.")
    @functools.wraps(function)
    def verb(*args: Any, **options: Any) -> Any:
        names = ("cron", "every", "at", "zone", "start", "end")
        when = {name: value for name in names if (value := options.pop(name)) is not None}
        if "every" in when:
            when["every"] = number_or_text(when["every"])
        moments = [name for name in ("at", "start", "end") if name in when]
        for name in moments:
            when[name] = _moment_of(when[name])
        if moments and "zone" not in when:
            when["zone"] = "UTC"
        return function(*args, when=when, **options)

    return verb


@schedule.command("next")
@click.argument("name", required=False)
@click.option("-n", "--count", default=5, show_default=True, help="The number of times to show.")
@when_options
@json_option
@url_option
@app_option
def next_(
    name: str | None,
    count: int,
    when: dict[str, Any],
    as_json: bool,
    url: str | None,
    app: str | None,
) -> None:
    """Show the next times of the schedule NAME, or of the rule in the options.

    A schedule shows the times that get a job. Without catch_up, one job stands for all times that
    were missed.
    """
    if bool(name) == bool(when):
        raise click.UsageError("give the NAME of a schedule, or options such as --cron")
    if name:
        with open_mill(url, app) as mill:
            found = mill.schedules.next_times(name, count)
    else:
        found = _preview(When(**when), count)
    if as_json:
        console.print_json({"next": [moment.timestamp() for moment in found]})
    for moment in () if as_json else found:
        is_past = moment.timestamp() <= clock.wall()
        click.echo(f"{_shown(moment)}{'  past: a worker puts its job at once' if is_past else ''}")
    if not found and not as_json:
        click.echo(f"{name or 'the rule'} has no further times, or does not fire now", err=True)


def _preview(when: When, count: int) -> list[dt.datetime]:
    rule, now = when.rule, clock.wall()
    if rule.counts_from_start and not rule.start:
        raise click.UsageError("--every counts from --start; pass --start, too")
    found = times(rule, now, count)
    return [dt.datetime.fromtimestamp(moment, rule.tz) for moment in found if moment < math.inf]


@schedule.command()
@click.argument("name")
@click.argument("task")
@click.argument("args", nargs=-1)
@click.option("--kw", "pairs", multiple=True, metavar="NAME=VALUE", help="A keyword argument.")
@when_options
@click.option("--repeats", type=int, metavar="N", help="End after this many jobs.")
@click.option(
    "--jitter", type=float, metavar="SECONDS", help="Delay each job by a random time up to this."
)
@click.option("--catch-up", is_flag=True, help="Put one job for each missed time.")
@click.option("--queue", help="The queue, if not the task's own.")
@click.option("--priority", type=float, help="From -100 to 100; higher starts first.")
@click.option("--key", help="A key; only one unfinished job may have it, so jobs do not overlap.")
@click.option("--url", metavar="URL", help="The URL of the store, instead of an app.")
@app_with("The app with the task.")
@json_option
def add(
    name: str,
    task: str,
    args: tuple[str, ...],
    pairs: tuple[str, ...],
    when: dict[str, Any],
    repeats: int | None,
    jitter: float | None,
    catch_up: bool,
    url: str | None,
    app: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Add a schedule NAME that enqueues a call of TASK.

    Pass one of --cron, --every and --at. ARGS and the values of --kw are read as JSON if they are
    valid JSON, and otherwise as strings. Without an app, nobody checks TASK until a worker runs it.
    """
    given = {key: value for key, value in options.items() if value is not None}
    kwargs = dict(keyword(text) for text in pairs)
    rule = When(**when, repeats=repeats, jitter=jitter, catch_up=catch_up)
    with open_mill(url, app, tasks=True) as mill:
        try:
            call = mill.call(task, *map(argument, args), **kwargs).using(**given)
        except TypeError as error:
            raise InvalidOption(str(error)) from None
        added = mill.schedules.add(name, call, rule)
        audit(mill.broker, "added schedule", name)
        _print(added, as_json)


def _print(row: Schedule, as_json: bool) -> None:
    state = "is paused" if row.paused else f"fires next at {_shown(row.next)}"
    console.answer(row.public(), as_json, f"{row.name} {'has ended' if row.ended else state}")


def _print_all(rows: list[Schedule], as_json: bool) -> None:
    if as_json:
        console.print_json({"schedules": [row.public() for row in rows]})
    for row in () if as_json else rows:
        _print(row, False)


def _known(mill: Tidemill, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names. If a schedule is missing, raise an error before any change."""
    for name in names:
        mill.schedules.get(name)
    return names


@schedule.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@store_options
def pause(mill: Tidemill, names: tuple[str, ...], as_json: bool) -> None:
    """Pause schedules: they do not fire until they are resumed."""
    rows = []
    for name in _known(mill, names):
        rows.append(mill.schedules.pause(name))
        audit(mill.broker, "paused schedule", name)
    _print_all(rows, as_json)


@schedule.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@store_options
def resume(mill: Tidemill, names: tuple[str, ...], as_json: bool) -> None:
    """Resume paused schedules from now on."""
    rows = []
    for name in _known(mill, names):
        rows.append(mill.schedules.resume(name))
        audit(mill.broker, "resumed schedule", name)
    _print_all(rows, as_json)


@schedule.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@store_options
def remove(mill: Tidemill, names: tuple[str, ...], as_json: bool) -> None:
    """Remove schedules; a schedule in code comes back when a worker with that code starts."""
    for name in _known(mill, names):
        row = mill.schedules.get(name)
        mill.schedules.remove(name)
        audit(mill.broker, "removed schedule", name)
        if not as_json:
            back = row.code and row.declared is not False
            click.echo(f"{name} is removed{', until a worker starts' if back else ''}")
    if as_json:
        console.print_json({"removed": list(names)})


@schedule.command()
@click.argument("name")
@store_options
def run(mill: Tidemill, name: str, as_json: bool) -> None:
    """Enqueue a schedule's job now, in addition to its times, and print the job's id."""
    job = mill.schedules.run(name)
    audit(mill.broker, "ran schedule", name)
    console.answer({"id": job.id, "placed": str(job.placed) or None}, as_json, job.id)
