"""``tidemill bind``, ``unbind`` and ``publish``: messages to the queues bound to their topics."""

from __future__ import annotations

import click

from tidemill.app import Tidemill
from tidemill.cli import console
from tidemill.cli.connect import store_options
from tidemill.cli.enqueue import argument
from tidemill.core.suggest import hint
from tidemill.errors import TidemillError


@click.command()
@click.argument("queue")
@click.argument("pattern")
@store_options
def bind(mill: Tidemill, queue: str, pattern: str, as_json: bool) -> None:
    """Bind QUEUE to topics.

    QUEUE gets a copy of each message that is published to these topics.

    PATTERN is words with dots between them; * is exactly one word, # any number of words. Quote it
    for the shell: 'orders.*'.
    """
    added = mill.queue(queue).bind(pattern)
    _show(mill, queue, as_json, f"is bound to {pattern}{'' if added else ' already'}")


@click.command()
@click.argument("queue")
@click.argument("pattern")
@store_options
def unbind(mill: Tidemill, queue: str, pattern: str, as_json: bool) -> None:
    """Delete the binding of QUEUE to PATTERN.

    The messages of the queue stay.
    """
    if not mill.queue(queue).unbind(pattern):
        known = mill.queue(queue).bindings()
        near = hint(pattern, known) if known else "it has no bindings"
        raise TidemillError(f"queue {queue!r} is not bound to {pattern!r}; {near}")
    _show(mill, queue, as_json, f"is bound to {pattern} no more")


@click.command()
@click.argument("topic")
@click.argument("body")
@click.option("--mandatory", is_flag=True, help="Fail when no queue is bound to TOPIC.")
@store_options
def publish(mill: Tidemill, topic: str, body: str, mandatory: bool, as_json: bool) -> None:
    """Put a copy of BODY into each queue that is bound to TOPIC.

    BODY is read as JSON if it is valid JSON, and otherwise as a string. TOPIC is words with dots
    between them, such as orders.eu.new.
    """
    copies = [job.record for job in mill.publish(topic, argument(body), mandatory=mandatory)]
    put = [{"queue": copy.envelope.queue, "id": copy.envelope.id} for copy in copies]
    if as_json:
        console.print_json({"topic": topic, "messages": put})
    elif put:
        click.echo("\n".join(f"{one['queue']} {one['id']}" for one in put))
    else:
        click.echo(f"no queue is bound to {topic}; nothing was put", err=True)


def _show(mill: Tidemill, queue: str, as_json: bool, text: str) -> None:
    console.answer(
        {"queue": queue, "bindings": mill.queue(queue).bindings()}, as_json, f"{queue} {text}"
    )
