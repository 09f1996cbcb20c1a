"""``tidemill move``: all of a store into another."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from tidemill.brokers.base import open_broker
from tidemill.cli.connect import json_option, open_mill
from tidemill.move import call_off
from tidemill.move import move as move_all
from tidemill.moved import Moved
from tidemill.pour import listed

__all__ = ["move"]

_SHOWN = 10


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--cancel", "off", is_flag=True, help="Call a move off that has copied nothing yet.")
@click.option("--leave", is_flag=True, help="Leave behind what TO has no place for.")
@click.option(
    "-Q",
    "--queues",
    default="",
    help="Comma-separated: queues of amqp:// whose names it may have forgotten.",
)
@json_option
def move(source: str, target: str, off: bool, leave: bool, queues: str, as_json: bool) -> None:
    """Move every job of one store into another.

    FROM and TO are broker urls. FROM stops at once: puts there fail with a sentence that names TO,
    workers finish what runs and end. Then everything unfinished and all kept results go over, with
    state, due time, priority, order, key, attempts and headers. Killed in the middle, the same
    command goes on. FROM keeps its copy and stays closed.

    A TO that only carries jobs (amqp://) gets those that are ready or scheduled, in their order,
    and those that failed, with attempts, last error, priority and what is left of their delay. Jobs
    with keys, limits or others before them, schedules, and queues that are paused or bounded are
    refused beforehand, or stay with --leave; what else finished stays.

    A FROM that only carries jobs is emptied, and cannot be closed: stop its workers, and have
    producers put to TO, before. What workers hold stays with them. The command says what was left,
    and given again it takes that, too; it exits with 1 when a queue there did not answer.

    Start workers on TO when it is done: they may run meanwhile, but then newer jobs may come first.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with open_mill(source) as mill:
        here, there = mill.broker, open_broker(target)
        try:
            if off:
                call_off(here, there)
                click.echo(f"{here.url} goes on")
                return
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            console = Console(stderr=True)
            with Progress(*columns, console=console, disable=as_json) as bar:
                shown = bar.add_task("waiting for what runs", total=None)

                def tell(moved: Moved) -> None:
                    if moved.running:
                        what = "a running job" if moved.running == 1 else "running jobs"
                        bar.update(shown, description=f"waiting for {moved.running} {what}")
                    else:
                        total, done = moved.total or None, moved.done
                        bar.update(shown, description="moving", total=total, completed=done)

                named = [name for name in queues.split(",") if name]
                moved = move_all(here, there, tell, leave=leave, queues=named)
            _report(moved, here.url, there.url, as_json)
            if moved.unanswered:
                sys.exit(1)
        finally:
            there.close()


def _report(moved: Moved, source: str, where: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_document(moved, source, where)))
        return
    everything = moved.done + moved.schedules + moved.repeated + moved.remaining
    if moved.total and not everything:
        click.echo(f"all of {source} went to {where} before")
        return
    what = f"{moved.gone} jobs" + (f" and {moved.schedules} schedules" if moved.schedules else "")
    click.echo(f"{what} moved to {where}; set TIDEMILL_URL to it and start the workers")
    for line in _left(moved, source):
        click.echo(line)


def _document(moved: Moved, source: str, where: str) -> dict[str, Any]:
    return {
        "from": source,
        "to": where,
        "moved": moved.gone,
        "schedules": moved.schedules,
        "stayed": moved.stayed,
        "stayed_schedules": moved.stayed_schedules,
        "left": moved.left,
        "repeated": moved.repeated,
        "strange": moved.strange,
        "remaining": moved.remaining,
        "consumers": moved.consumers,
        "unanswered": moved.unanswered,
    }


def _left(moved: Moved, source: str) -> Iterator[str]:
    """What a human should know of what did not go."""
    if moved.repeated:
        yield f"{moved.repeated:,} jobs were there already, or came twice"
    if moved.left:
        yield f"left behind in {source}: {', '.join(listed(moved.left))}"
    if moved.stayed_schedules:
        names = ", ".join(moved.stayed_schedules[:_SHOWN])
        yield f"schedules stayed, since their names are taken there: {names}"
    if moved.stayed:
        names = _some(moved.stayed)
        yield f"{len(moved.stayed)} jobs stayed, since their id or key is taken there: {names}"
    if moved.strange:
        yield f"{len(moved.strange)} messages stayed, which are no jobs: {_some(moved.strange)}"
    if moved.unanswered:
        names = _some(moved.unanswered)
        yield f"queues of {source} did not answer, and what is there stayed: {names}; mend them,"
        yield "and give the command again"
    if moved.remaining:
        yield f"{moved.remaining:,} jobs came to {source} meanwhile: give the command again"
    if moved.consumers:
        yield (
            f"{moved.consumers} consumers still take jobs of {source}, and keep what they hold: "
            "stop those workers, and give the command again"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
