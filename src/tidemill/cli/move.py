"""``tidemill move``: all of a store into another."""

from __future__ import annotations

import json

import click

from tidemill.brokers.base import open_broker
from tidemill.cli.connect import json_option, open_mill
from tidemill.move import Moved, call_off
from tidemill.move import move as move_all

__all__ = ["move"]

_SHOWN = 10


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--cancel", "off", is_flag=True, help="Call a move off that has copied nothing yet.")
@click.option("--leave", is_flag=True, help="Leave behind what TO has no place for.")
@json_option
def move(source: str, target: str, off: bool, leave: bool, as_json: bool) -> None:
    """Move every job of one store into another.

    FROM and TO are broker urls. FROM stops at once: puts there fail with a sentence that names TO,
    workers finish what runs and end. Then everything unfinished and all kept results go over, with
    state, due time, priority, order, key, attempts and headers. Killed in the middle, the same
    command goes on. FROM keeps its copy and stays closed.

    A TO that only carries jobs (amqp://) gets those that are ready or scheduled, in their order,
    with attempts, priority and what is left of their delay. Jobs with keys, limits or others before
    them, and schedules, are refused beforehand, or stay with --leave; what finished stays.

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

                moved = move_all(here, there, tell, leave=leave)
            _report(moved, here.url, there.url, as_json)
        finally:
            there.close()


def _report(moved: Moved, source: str, where: str, as_json: bool) -> None:
    gone = moved.done - len(moved.stayed)
    if as_json:
        stayed = {"stayed": moved.stayed, "stayed_schedules": moved.stayed_schedules}
        document = {"from": source, "moved": gone, "schedules": moved.schedules, "to": where}
        if moved.left:
            document["left"] = moved.left
        click.echo(json.dumps(document | stayed))
        return
    if moved.total and not (moved.done or moved.schedules):
        click.echo(f"all of {source} went to {where} before")
        return
    what = f"{gone} jobs" + (f" and {moved.schedules} schedules" if moved.schedules else "")
    click.echo(f"{what} moved to {where}; set TIDEMILL_URL to it and start the workers")
    if moved.left:
        click.echo(f"{moved.left:,} jobs were left behind in {source}")
    if moved.stayed_schedules:
        names = ", ".join(moved.stayed_schedules[:_SHOWN])
        click.echo(f"schedules stayed, since their names are taken there: {names}")
    if moved.stayed:
        names = ", ".join(moved.stayed[:_SHOWN]) + (" …" if len(moved.stayed) > _SHOWN else "")
        click.echo(
            f"{len(moved.stayed)} jobs stayed, since their id or key is taken there: {names}"
        )
