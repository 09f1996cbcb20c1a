"""``tidemill limit``: what limits there are, and changing one."""

from __future__ import annotations

from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.cli.connect import json_option, store_options
from tidemill.errors import InvalidOption, TidemillError
from tidemill.gate import LimitStats
from tidemill.limits import Breaker, limit_public, terms_text

__all__ = ["limit", "state_of"]

_NONE = "none"


@click.command()
@click.argument("name", required=False)
@click.option("--queue", "of_queue", is_flag=True, help="NAME is a queue.")
@click.option("--rate", help="As 10/s, 100/m, 5000/h, 1/d or 10/30s; 0/s starts nothing.")
@click.option("--burst", help="Tokens the bucket of the rate holds at most.")
@click.option("--window", help="As 100/m: never more than that start within any such time.")
@click.option("--concurrency", help="Jobs that run at a time.")
@click.option("--breaker", help="Failures in a row after which a queue pauses.")
@click.option("--pause", type=float, default=30.0, show_default=True, help="Seconds it does.")
@click.option("--declared", is_flag=True, help="Back to what code declares.")
@json_option
@store_options
def limit(
    mill: Tidemill,
    name: str | None,
    of_queue: bool,
    pause: float,
    declared: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """List limits, or change that of a task (by its NAME, or the limit's own) or of a queue.

    A change holds at once, for all workers, whatever code declares, until somebody changes it again
    or gives it back to the code with --declared. What is not given stays; none lifts that part.
    """
    changes = {
        option: _value(option, text, pause) for option, text in options.items() if text is not None
    }
    if declared and changes:
        raise InvalidOption("--declared has the code's limit hold: give no other with it")
    if name is None:
        if changes or declared:
            raise InvalidOption("name the limit that is to change: tidemill limit NAME --rate 10/s")
        _list(mill, as_json)
        return
    rows = {(row.name, row.queue) for row in mill.limits.list()}
    if not of_queue and (name, False) not in rows:
        hint = "; for the queue of that name add --queue" if (name, True) in rows else ""
        raise TidemillError(f"no job has brought along a limit of the name {name!r}{hint}")
    queues = {row.name for row in mill.broker.stats()} if of_queue else set()
    if of_queue and name not in queues and (name, True) not in rows:
        raise TidemillError(f"there is no queue {name!r}: nothing was put there, or set for it")
    if declared:
        (mill.limits.reset_queue if of_queue else mill.limits.reset)(name)
    if changes:
        (mill.limits.set_queue if of_queue else mill.limits.set)(name, **changes)
    _list(mill, as_json, (name, of_queue))


def _value(option: str, text: Any, pause: float) -> Any:
    if text == _NONE:
        return None
    if option not in ("burst", "concurrency", "breaker"):
        return text
    try:
        if option == "burst":
            return float(text)
        return Breaker(int(text), pause) if option == "breaker" else int(text)
    except ValueError:
        what = "a number" if option == "burst" else "a whole number"
        raise InvalidOption(f"{option} must be {what} or none, not {text!r}") from None


def _list(mill: Tidemill, as_json: bool, only: tuple[str, bool] | None = None) -> None:
    from tidemill.cli import show

    rows = [row for row in mill.limits.list() if only in (None, (row.name, row.queue))]
    if as_json:
        show.print_json({"limits": [limit_public(row) for row in rows]})
        return
    out = show.console()
    if not rows:
        out.print(f"no limits in {mill.broker.url}")
        return
    cells = [
        (
            f"queue {row.name}" if row.queue else row.name,
            terms_text(row.terms) or _NONE,
            f"{row.running:,}",
            "-" if row.queue else f"{row.keys:,}",
            state_of(row),
        )
        for row in rows
    ]
    out.print(show.table(out, ("limit", "terms", "running#", "keys#?", "state"), cells))


def state_of(row: LimitStats) -> str:
    """Why a queue's limit lets no job start now, in a few words; empty when it does."""
    from tidemill.cli import show

    breaker = row.terms.breaker
    when = f"opens in {show.span(row.until)}" if 0 < row.until < float("inf") else ""
    if breaker is not None and row.failures >= breaker[0]:
        return f"broken after {row.failures} failures, {when or 'tries one job'}"
    return when or ("closed" if row.until else "")
