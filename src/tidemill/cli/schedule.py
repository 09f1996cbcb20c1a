"""``tidemill schedule``: what is put again and again, and when."""

from __future__ import annotations

import datetime as dt
import functools
import math
from collections.abc import Callable
from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.cli.connect import json_option, open_mill, store_options
from tidemill.cli.enqueue import argument, keyword
from tidemill.clock import wall_time
from tidemill.errors import InvalidOption
from tidemill.schedules.book import Schedule
from tidemill.schedules.reading import When
from tidemill.schedules.rules import times

__all__ = ["schedule"]

Verb = Callable[..., Any]


@click.group()
def schedule() -> None:
    """List, add and change schedules.

    Workers fire them, each time exactly once; those declared in code are stored when a worker
    starts.
    """


# -- looking -------------------------------------------------------------------------------------


@schedule.command("list")
@json_option
@store_options
def list_(mill: Tidemill, as_json: bool) -> None:
    """List schedules. With --app it says which of them name a task that the app does not have."""
    from tidemill.cli import show

    rows, out = [*mill.schedules], show.console()
    if as_json:
        show.print_json({"schedules": [row.public() for row in rows]})
    elif not rows:
        out.print(f"no schedules in {mill.broker.url}")
    else:
        columns = ("schedule", "when", "next", "task…", "fired#?", "last?", "from?", "note")
        cells = [
            (
                *(row.name, row.when, _shown(row.next), f"{row.task}({row.arguments})"),
                *(f"{row.fired:,}", _ago(row.last), (row.app or "code") if row.code else ""),
                _note(row),
            )
            for row in rows
        ]
        out.print(show.table(out, columns, cells))


def _note(row: Schedule) -> Any:
    from tidemill.cli.show import styled

    if row.undeclared:
        return styled(f"not declared since {_shown(row.undeclared)}")
    if row.known is False:
        return styled("unknown task")
    if row.paused or row.ended:
        return styled("paused" if row.paused else "ended")
    if row.declared is False:
        return styled("no worker declares it")
    return f"{row.repeats - row.fired:,} left" if row.repeats else ""


def _shown(moment: dt.datetime | None) -> str:
    """A time in its schedule's own zone."""
    return moment.isoformat(" ", "seconds") if moment else "-"


def _ago(moment: dt.datetime | None) -> str:
    from tidemill.cli.show import ago

    return ago(moment.timestamp()) if moment else "-"


# -- when ----------------------------------------------------------------------------------------


def _moment_of(text: str) -> Any:
    try:
        return dt.datetime.fromisoformat(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InvalidOption(f"{text!r} is no time; write it as 2027-01-31T09:00") from None


def _every_of(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def when_options(function: Verb) -> Verb:
    """Give a verb the options that say when; it is called with ``when``, a dict of those given."""

    @click.option("--cron", metavar="TEXT", help="Five fields, or six with seconds first.")
    @click.option("--every", metavar="STEP", help="Seconds, or as '15 minutes', '3 months'.")
    @click.option("--at", metavar="TIME", help="Once, as 2027-01-31T09:00 in --zone.")
    @click.option("--zone", metavar="ZONE", help="As Europe/Berlin; UTC if there is none.")
    @click.option("--start", metavar="TIME", help="Not before; what --every counts from.")
    @click.option("--end", metavar="TIME", help="Not after.")
    @functools.wraps(function)
    def verb(*args: Any, **options: Any) -> Any:
        names = ("cron", "every", "at", "zone", "start", "end")
        when = {name: value for name in names if (value := options.pop(name)) is not None}
        if "every" in when:
            when["every"] = _every_of(when["every"])
        moments = [name for name in ("at", "start", "end") if name in when]
        for name in moments:
            when[name] = _moment_of(when[name])
        if moments and "zone" not in when:
            when["zone"] = "UTC"
        return function(*args, when=when, **options)

    return verb


@schedule.command("next")
@click.argument("name", required=False)
@click.option("-n", "--count", default=5, show_default=True, help="How many times to show.")
@when_options
@json_option
@click.option("--url", metavar="URL", help="Where the jobs live.")
@click.option("--app", envvar="TIDEMILL_APP", metavar="MODULE:VAR", help="The app they are of.")
def next_(
    name: str | None,
    count: int,
    when: dict[str, Any],
    as_json: bool,
    url: str | None,
    app: str | None,
) -> None:
    """Show when a schedule fires next; or, by options instead of NAME, when one would."""
    if bool(name) == bool(when):
        raise click.UsageError("give the NAME of a schedule, or options such as --cron")
    if name:
        with open_mill(url, app) as mill:
            found = mill.schedules.next_times(name, count)
    else:
        found = _preview(When(**when), count)
    if as_json:
        from tidemill.cli.show import print_json

        print_json({"next": [moment.timestamp() for moment in found]})
    for moment in () if as_json else found:
        click.echo(_shown(moment))
    if not found and not as_json:
        click.echo(f"{name or 'it'} does not fire any more, or is paused", err=True)


def _preview(when: When, count: int) -> list[dt.datetime]:
    rule, now = when.rule, wall_time()
    if rule.counts_from_start and not rule.start:
        raise click.UsageError("--every counts from --start; give that, too")
    found = times(rule, now, count)
    return [dt.datetime.fromtimestamp(moment, rule.tz) for moment in found if moment < math.inf]


# -- changing ------------------------------------------------------------------------------------


@schedule.command()
@click.argument("name")
@click.argument("task")
@click.argument("args", nargs=-1)
@click.option("--kw", "pairs", multiple=True, metavar="NAME=VALUE", help="A keyword argument.")
@when_options
@click.option("--repeats", type=int, metavar="N", help="End after so many jobs.")
@click.option("--jitter", type=float, metavar="SECONDS", help="Late by up to so much, at random.")
@click.option("--catch-up", is_flag=True, help="One job for each time that was missed.")
@click.option("--queue", help="The queue, instead of the task's own.")
@click.option("--priority", type=float, help="From -100 to 100, higher first.")
@click.option("--key", help="At most one unfinished job per key: no overlap.")
@click.option("--url", metavar="URL", help="Where the jobs live, instead of an app.")
@click.option(
    "--app", envvar="TIDEMILL_APP", metavar="MODULE:VAR", help="The app that has the task."
)
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
    """Add a schedule NAME that puts a call of TASK.

    Say when by one of --cron, --every and --at. ARGS and values of --kw are JSON where they parse
    as such, else strings. Without an app only a worker can tell whether TASK exists.
    """
    given = {key: value for key, value in options.items() if value is not None}
    kwargs = dict(keyword(text) for text in pairs)
    rule = When(**when, repeats=repeats, jitter=jitter, catch_up=catch_up)
    with open_mill(url, app, tasks=True) as mill:
        try:
            call = mill.call(task, *map(argument, args), **kwargs).using(**given)
        except TypeError as error:
            raise InvalidOption(f"{task} cannot be called so: {error}") from None
        _say(mill.schedules.add(name, call, rule), as_json)


def _say(row: Schedule, as_json: bool) -> None:
    if as_json:
        from tidemill.cli.show import print_json

        print_json(row.public())
    else:
        state = "is paused" if row.paused else f"fires next at {_shown(row.next)}"
        click.echo(f"{row.name} {'has ended' if row.ended else state}")


def _say_all(rows: list[Schedule], as_json: bool) -> None:
    if as_json:
        from tidemill.cli.show import print_json

        print_json({"schedules": [row.public() for row in rows]})
    for row in () if as_json else rows:
        _say(row, False)


def _known(mill: Tidemill, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, if all are there: nothing is done by halves."""
    for name in names:
        mill.schedules.get(name)
    return names


@schedule.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@json_option
@store_options
def pause(mill: Tidemill, names: tuple[str, ...], as_json: bool) -> None:
    """Have schedules not fire until they are resumed."""
    _say_all([mill.schedules.pause(name) for name in _known(mill, names)], as_json)


@schedule.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@json_option
@store_options
def resume(mill: Tidemill, names: tuple[str, ...], as_json: bool) -> None:
    """Let paused schedules go on from now."""
    _say_all([mill.schedules.resume(name) for name in _known(mill, names)], as_json)


@schedule.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@json_option
@store_options
def remove(mill: Tidemill, names: tuple[str, ...], as_json: bool) -> None:
    """Forget schedules. One that code declares comes back with the next worker that declares it."""
    for name in _known(mill, names):
        row = mill.schedules.get(name)
        mill.schedules.remove(name)
        if not as_json:
            back = row.code and row.declared is not False
            click.echo(f"{name} is removed{', until a worker starts' if back else ''}")
    if as_json:
        from tidemill.cli.show import print_json

        print_json({"removed": list(names)})


@schedule.command()
@click.argument("name")
@json_option
@store_options
def run(mill: Tidemill, name: str, as_json: bool) -> None:
    """Put a schedule's job now, besides its times; prints the id."""
    job = mill.schedules.run(name)
    if as_json:
        from tidemill.cli.show import print_json

        print_json({"id": job.id, "placed": str(job.placed) or None})
    else:
        click.echo(job.id)
