"""``tidemill move``: move all jobs of a store into another store."""

from __future__ import annotations

from collections.abc import Iterator

import click

from tidemill.brokers.registry import open_broker
from tidemill.cli import console
from tidemill.cli.connect import audit, json_option, open_mill
from tidemill.core.words import counted
from tidemill.transfer.store_to_store import cancel_move
from tidemill.transfer.store_to_store import move as move_all
from tidemill.transfer.to_rabbitmq import Moved, listed

_SHOWN = 10


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--cancel", "off", is_flag=True, help="Cancel a move that has copied nothing yet.")
@click.option("--leave", is_flag=True, help="Leave jobs behind that TO cannot store.")
@json_option
def move(source: str, target: str, off: bool, leave: bool, as_json: bool) -> None:
    """Move all jobs of the store FROM into the store TO.

    FROM and TO are broker URLs. FROM closes at once: puts there fail with an error that names TO,
    and workers finish their running jobs and end. Then all unfinished jobs and all kept results
    move, with state, due time, priority, order, key, attempts and headers. If the command is
    killed, the same command continues. FROM keeps its copy and stays closed.

    RabbitMQ (amqp://) as TO gets the ready and scheduled jobs in their order, with priority and due
    time. FROM deletes each page that RabbitMQ has, so a killed move may put a page twice. Finished
    jobs stay. The move is refused for jobs with keys, limits or parents, for schedules, and for
    queues that are paused or bounded. With --leave these jobs, schedules and paused queues stay in
    FROM, and the jobs of bounded queues move without the bound.

    Jobs cannot move out of RabbitMQ: let its workers empty it, and put new jobs into TO.

    Start the workers of TO after the move. If they run during the move, newer jobs may run before
    older jobs.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with open_mill(source) as mill:
        here, there = mill.broker, open_broker(target)
        try:
            if off:
                cancel_move(here, there)
                audit(here, "cancelled move", f"to {there.url}")
                click.echo(f"{here.url} goes on")
                return
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            console = Console(stderr=True)
            with Progress(*columns, console=console, disable=as_json) as bar:
                shown = bar.add_task("waiting for running jobs", total=None)

                def tell(moved: Moved) -> None:
                    if moved.running:
                        what = counted(moved.running, "running job")
                        bar.update(shown, description=f"waiting for {what}")
                    else:
                        total, done = moved.total or None, moved.done
                        bar.update(shown, description="moving", total=total, completed=done)

                moved = move_all(here, there, tell, leave=leave)
            if moved.done + moved.schedules:
                audit(there, "moved store", f"{here.url} to {there.url}", moved.gone)
            _report(moved, here.url, there.url, as_json)
        finally:
            there.close()


def _report(moved: Moved, source: str, where: str, as_json: bool) -> None:
    if as_json:
        same = ("schedules", "stayed", "stayed_schedules", "left")
        facts = {name: getattr(moved, name) for name in same}
        console.print_json({"from": source, "to": where, "moved": moved.gone, **facts})
        return
    if moved.total and not (moved.done + moved.schedules):
        click.echo(f"all of {source} has already moved to {where}")
        return
    what = counted(moved.gone, "job")
    what += f" and {counted(moved.schedules, 'schedule')}" if moved.schedules else ""
    click.echo(f"{what} moved to {where}; set TIDEMILL_URL to it and start the workers")
    for line in _left(moved, source):
        click.echo(line)


def _left(moved: Moved, source: str) -> Iterator[str]:
    if moved.left:
        yield f"left behind in {source}: {', '.join(listed(moved.left))}"
    if moved.stayed_schedules:
        names = ", ".join(moved.stayed_schedules[:_SHOWN])
        yield f"schedules stayed, because TO has their names: {names}"
    if moved.stayed:
        names = ", ".join(moved.stayed[:_SHOWN]) + (" …" if len(moved.stayed) > _SHOWN else "")
        yield f"{counted(len(moved.stayed), 'job')} stayed, because TO has their id or key: {names}"
