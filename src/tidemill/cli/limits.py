"""``tidemill limit``: list limits, and change a limit."""

from __future__ import annotations

from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.cli import console
from tidemill.cli.connect import audit, store_options
from tidemill.client.queues import no_such_queue
from tidemill.core.suggest import hint
from tidemill.doctor.queues import state_of_limit
from tidemill.errors import InvalidOption, TidemillError
from tidemill.limits.declare import limit_public, terms_text, value_of

_NONE = "none"


@click.command()
@click.argument("name", required=False)
@click.option("--queue", "of_queue", is_flag=True, help="NAME is a queue.")
@click.option(
    "--rate", help="Starts per time, as 10/s, 100/m, 5000/h, 1/d or 10/30s; 0/s starts nothing."
)
@click.option("--burst", help="The most jobs that a rate lets start at once, after a pause.")
@click.option("--window", help="The most jobs that start within any such time, as 100/m.")
@click.option("--concurrency", help="The most jobs that run at a time.")
@click.option("--breaker", help="Failures in a row that pause a queue.")
@click.option(
    "--pause", type=float, help="Seconds that the breaker of --breaker pauses a queue; default 30."
)
@click.option("--declared", is_flag=True, help="Use the settings that code declares again.")
@store_options
def limit(
    mill: Tidemill,
    name: str | None,
    of_queue: bool,
    pause: float | None,
    declared: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """List limits, or change the limit NAME.

    NAME is the name of a limit, or of a task whose limit has no name; with --queue a queue. If the
    limit has keys, each key has the new settings. A change holds at once for all workers, and code
    does not override it. It ends with the next change, or with --declared. Settings that you do not
    pass stay; the value none removes a setting.
    """
    if pause is not None and options["breaker"] in (None, _NONE):
        raise InvalidOption("--pause belongs to a breaker: give --breaker FAILURES with it")
    changes = {
        option: None if text == _NONE else value_of(option, text, 30.0 if pause is None else pause)
        for option, text in options.items()
        if text is not None
    }
    if declared and changes:
        raise InvalidOption(
            "--declared uses the settings of the code: pass no other settings with it"
        )
    if name is None:
        if changes or declared:
            raise InvalidOption("name the limit to change: tidemill limit NAME --rate 10/s")
        _list(mill, as_json)
        return
    rows = {(row.name, row.queue) for row in mill.limits.list()}
    if not of_queue and (name, False) not in rows:
        queue = "for the queue of that name add --queue" if (name, True) in rows else ""
        near = queue or hint(name, [row for row, is_queue in rows if not is_queue])
        text = f"no job has had a limit of the name {name!r}; a limit begins with its first job"
        raise TidemillError(f"{text}; {near}")
    queues = {row.name for row in mill.broker.stats()} if of_queue else set()
    if of_queue and name not in queues and (name, True) not in rows:
        raise no_such_queue(name, {*queues, *(row for row, is_queue in rows if is_queue)})
    if declared:
        (mill.limits.reset_queue if of_queue else mill.limits.reset)(name)
    if changes:
        (mill.limits.set_queue if of_queue else mill.limits.set)(name, **changes)
    if declared or changes:
        what = "queue limits" if of_queue else "limit"
        audit(mill.broker, f"{'reset' if declared else 'changed'} {what}", name)
    _list(mill, as_json, (name, of_queue))


def _list(mill: Tidemill, as_json: bool, only: tuple[str, bool] | None = None) -> None:
    rows = [row for row in mill.limits.list() if only in (None, (row.name, row.queue))]
    cells = [
        (
            f"queue {row.name}" if row.queue else row.name,
            terms_text(row.terms) or _NONE,
            f"{row.running:,}",
            "-" if row.queue else f"{row.keys:,}",
            state_of_limit(row),
        )
        for row in rows
    ]
    columns = ("limit", "terms", "running#", "keys#?", "state")
    document = {"limits": [limit_public(row) for row in rows]}
    console.answer_table(document, as_json, columns, cells, f"no limits in {mill.broker.url}")
