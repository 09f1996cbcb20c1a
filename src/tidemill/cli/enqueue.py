"""``tidemill enqueue``: enqueue a call from the shell."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from tidemill.brokers.contract.features import Feature
from tidemill.cli import console
from tidemill.cli.connect import app_with, json_option, open_mill
from tidemill.client.job_handle import Job
from tidemill.core.config import number_or_text
from tidemill.core.job import State
from tidemill.errors import InvalidOption, JobFailed, JobUnsuccessful, ResultTimeout


@click.command()
@click.argument("task")
@click.argument("args", nargs=-1)
@app_with("The app that has the task or allows its import.")
@click.option("--url", metavar="URL", help="The URL of the store, instead of an app.")
@click.option("--kw", "pairs", multiple=True, metavar="NAME=VALUE", help="A keyword argument.")
@click.option(
    "--delay",
    type=number_or_text,
    metavar="TIME",
    help="Start no earlier than this time from now: seconds, or a text such as '5 minutes'.",
)
@click.option("--priority", type=float, help="From -100 to 100; higher starts first.")
@click.option("--queue", help="The queue, if not the task's own.")
@click.option("--key", help="A key; only one unfinished job may have it.")
@click.option("--id", help="Your own id for the job.")
@click.option("--wait", type=float, metavar="SECONDS", help="Wait for the result and print it.")
@json_option
def enqueue(
    task: str,
    args: tuple[str, ...],
    app: str | None,
    url: str | None,
    pairs: tuple[str, ...],
    wait: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Enqueue a call of TASK.

    TASK is a task of the app, a task of a worker, or a path that the app allows.

    ARGS and the values of --kw are read as JSON if they are valid JSON, and otherwise as strings:
    3, true, '[1, 2]', '{"a": 1}', a.png, '"3"'. Put -- before an argument that begins with a minus.

    A task that the app does not have takes the options that its worker has declared. If no worker
    has declared TASK, give --queue. Nobody checks the arguments then until a worker runs the call.
    """
    mill = open_mill(url, app, tasks=True)
    given = {name: value for name, value in options.items() if value is not None}
    kwargs = dict(keyword(text) for text in pairs)
    with mill:
        if wait is not None:
            mill.runtime.features.need(Feature.RESULTS, "--wait")
        try:
            job = mill.enqueue(mill.call(task, *map(argument, args), **kwargs).using(**given))
        except TypeError as error:
            raise InvalidOption(str(error)) from None
        document = {"id": job.id, "placed": str(job.placed) or None, "state": None, "result": None}
        if wait is None:
            note = "" if document["placed"] in (None, "created") else f" ({document['placed']})"
            console.answer(document, as_json, f"{job.id}{note}")
            return
        sys.exit(_await(job, wait, document, as_json))


def _await(job: Job[Any], seconds: float, document: dict[str, Any], as_json: bool) -> int:
    try:
        result = job.result(seconds)
    except (JobUnsuccessful, ResultTimeout) as error:
        document["state"] = str(job.state)
        text = error.error if isinstance(error, JobFailed) else str(error)
        document["error"] = text
        if as_json:
            console.print_json(document)
        else:
            failed = isinstance(error, JobFailed)
            text = f"job {job.id} failed: {text}" if failed else text  # other texts name the job
            trail = (
                "" if isinstance(error, ResultTimeout) else f"; its trail: tidemill job {job.id}"
            )
            click.echo(f"tidemill: {console.clean(text)}{trail}", err=True)
        return 1
    document["state"], document["result"] = str(State.SUCCEEDED), console.plain(result)
    text = result if isinstance(result, str) else repr(result)
    console.answer(document, as_json, console.clean(text))
    return 0


def argument(text: str) -> Any:
    """An argument from the command line: JSON if it is valid JSON, otherwise a string."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return text


def keyword(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidOption(f"--kw {text!r} is not name=value")
    return name, argument(value)
