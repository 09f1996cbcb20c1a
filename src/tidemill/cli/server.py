"""``tidemill server`` and ``tidemill token``: serve a store over HTTP, and manage its tokens."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.app_loader import load_app
from tidemill.brokers.contract.features import Feature
from tidemill.cli import console
from tidemill.cli.connect import json_option, log_options, with_default
from tidemill.core.clock import clock
from tidemill.core.log_output import LogSettings, log_output
from tidemill.errors import FeatureMissing, InvalidOption

_AUTH = click.option(
    "--auth",
    envvar="TIDEMILL_AUTH",
    show_envvar=True,
    default="",
    metavar="FILE",
    help="The file with the tokens.",
)
_ROLES = ["viewer", "operator", "admin"]


@click.command()
@click.argument("where", required=False, metavar="[APP or URL]")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@with_default(
    "--port", click.IntRange(0, 65535), 8333, "The port to listen on; 0 for any free port."
)
@_AUTH
@click.option("--tls-cert", default="", metavar="FILE", help="Serve https with this certificate.")
@click.option("--tls-key", default="", metavar="FILE", help="The certificate's key.")
@click.option(
    "--tls-ca", default="", metavar="FILE", help="Require client certificates of this authority."
)
@click.option(
    "--tls-role",
    type=click.Choice(_ROLES),
    callback=lambda context, option, role: role or "",
    help="The role of clients with a certificate, without --auth; default operator.",
)
@click.option(
    "--allow-host", "allow_hosts", multiple=True, metavar="NAME", help="Also accept this host name."
)
@with_default(
    "--max-request", click.IntRange(1024), 16 << 20, "The most bytes of a request.", metavar="BYTES"
)
@with_default(
    "--max-memory",
    click.IntRange(1024),
    256 << 20,
    "The most bytes of memory for large bodies and answers together.",
    metavar="BYTES",
)
@click.option(
    "--rate",
    type=click.FloatRange(0),
    default=0.0,
    help="The most requests per second of each client; 0 for no limit.",
)
@with_default(
    "--max-connections", click.IntRange(1), 10_000, "The most open connections at a time."
)
@with_default(
    "--body-timeout",
    click.FloatRange(0, min_open=True),
    60.0,
    "Seconds that receiving a body, or sending an answer, may take.",
)
@with_default(
    "--longest-poll",
    click.FloatRange(0),
    300.0,
    "Seconds that a long poll may take; a proxy in front must allow them.",
)
@with_default(
    "--shutdown-timeout",
    click.FloatRange(1),
    30.0,
    "Seconds for open requests after the first TERM or INT.",
)
@click.option(
    "--dashboard/--no-dashboard", default=True, show_default=True, help="Serve the dashboard at /."
)
@with_default(
    "--see-arguments",
    click.Choice(_ROLES),
    "viewer",
    "The least role that sees arguments and results of jobs.",
)
@click.option(
    "--beanstalk",
    is_flag=False,
    flag_value="127.0.0.1:11300",
    default="",
    metavar="[HOST:PORT]",
    help="Also serve beanstalkd's protocol; default 127.0.0.1:11300.",
)
@click.option(
    "--beanstalk-tasks",
    is_flag=True,
    help='Treat beanstalk bodies like {"task": …} as calls of tasks.',
)
@click.option(
    "--beanstalk-trust",
    is_flag=True,
    help="Trust all clients of the beanstalk port, which has no auth.",
)
@with_default(
    "--beanstalk-max-job",
    click.IntRange(1),
    65535,
    "The most bytes of a beanstalk job's body.",
    metavar="BYTES",
)
@click.option("--public-metrics", is_flag=True, help="Serve /metrics without a token.")
@click.option(
    "--alerts",
    metavar="RULES",
    envvar="TIDEMILL_ALERTS",
    show_envvar=True,
    help="Also watch the store by the rules of this file: see tidemill alerts.",
)
@click.option("--workers", metavar="APP", help="Also run a worker of this app.")
@click.option("-p", "--processes", type=click.IntRange(1, 512), help="Processes of that worker.")
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1, 10_000),
    help="Jobs at a time in each process of that worker.",
)
@click.option("-Q", "--queues", help="Queues of that worker, comma-separated.")
@log_options
def server(
    where: str | None,
    workers: str | None,
    alerts: str | None,
    processes: int | None,
    concurrency: int | None,
    queues: str | None,
    logs: LogSettings,
    **options: Any,
) -> None:
    """Serve an app or a store over HTTP, and its dashboard.

    Name the app as module:variable, or the store by its URL.

    Without an argument the command serves the app of --workers or of $TIDEMILL_APP, or the store
    of $TIDEMILL_URL, or the nearest .tidemill directory.

    Signals: TERM or INT answers the open requests and ends; a second signal, at least 0.2 s
    later, ends at once. Exit codes: 0 clean, 2 wrong usage or import error, 3 broker unreachable.
    """
    where = where or workers or os.environ.get("TIDEMILL_APP") or None
    serve, Settings = load_server()
    settings = Settings(
        access_log=logs.number <= logging.INFO,
        log_json=logs.format == "json",
        log_steps=logs.number <= logging.DEBUG,
        app=next((name for name in (workers, where) if name and "://" not in name), ""),
        **options,
    )
    beside = {"-p": processes, "-c": concurrency, "-Q": queues}
    given = [str(part) for pair in beside.items() if pair[1] is not None for part in pair]
    if given and not workers:
        raise InvalidOption(
            f"{given[0]} is for the worker of the server; pass --workers APP with it"
        )
    with log_output(logs):
        mill = _mill(where)
    with mill, _watching(mill, alerts):
        if workers:
            mill.runtime.features.need(Feature.PROCESSES, "--workers")
        sys.exit(serve(mill, settings, [workers, *given] if workers else ()))


@contextlib.contextmanager
def _watching(mill: Tidemill, rules: str | None) -> Iterator[None]:
    """Watch the store for the time of a block, if there are rules."""
    if not rules:
        yield
        return
    from tidemill.alerts.rules import read_rules
    from tidemill.alerts.watch import Watch

    watch = Watch(mill, read_rules(rules))
    watch.start()
    try:
        yield
    finally:
        watch.close()


def _mill(where: str | None) -> Tidemill:
    mill = Tidemill(where) if where is None or "://" in where else load_app(where)
    if mill.sync:
        raise FeatureMissing("the app has sync=True: it stores no jobs that could be served")
    return mill


@click.group()
def token() -> None:
    """Manage the tokens for tidemill server --auth FILE.

    A viewer reads. An operator also puts, takes and settles jobs, and retries, cancels or deletes
    them. An admin also purges queues and changes limits and schedules.
    """


@token.command()
@click.argument("name")
@with_default("--role", click.Choice(_ROLES), "operator", "What clients with the token may do.")
@click.option(
    "--days",
    type=click.FloatRange(0, min_open=True),
    help="Days until the token expires; without it, never.",
)
@click.option(
    "--queue",
    "-Q",
    "queues",
    multiple=True,
    help="Allow only this queue; repeat it for more queues.",
)
@_AUTH
@json_option
def create(
    name: str, role: str, days: float | None, queues: tuple[str, ...], auth: str, as_json: bool
) -> None:
    """Make a token NAME and print it once: the file keeps only its hash."""
    from tidemill.server.tokens import Role
    from tidemill.server.tokens import create as make

    expires = clock.wall() + days * 86400 if days else 0.0
    made = make(_file(auth), name, Role[role.upper()], expires, queues)
    facts = {"name": name, "role": role, "queues": queues, "expires": expires or None}
    console.answer({"token": made, **facts}, as_json, made)


@token.command("list")
@_AUTH
@json_option
def show(auth: str, as_json: bool) -> None:
    """List the tokens of a file."""
    from tidemill.server.tokens import read

    found = read(_file(auth))
    rows = [
        {"name": t.name, "role": t.role, "queues": list(t.queues), "created": t.created}
        | {"expires": t.expires or None}
        for t in found
    ]
    cells = [
        (t.name, t.role, ", ".join(t.queues) or "all", console.ago(t.created), _until(t.expires))
        for t in found
    ]
    columns = ("name", "role", "queues", "age", "expires")
    console.answer_table({"tokens": rows}, as_json, columns, cells, "no tokens")


def _until(expires: float) -> str:
    return dt.datetime.fromtimestamp(expires).isoformat(" ", "minutes") if expires else "never"


@token.command()
@click.argument("name")
@_AUTH
@json_option
def revoke(name: str, auth: str, as_json: bool) -> None:
    """Remove a token from the file; running servers refuse it within a second."""
    from tidemill.server.tokens import revoke as take_out

    take_out(_file(auth), name)
    console.answer({"revoked": name}, as_json, f"{name} is revoked")


def _file(auth: str) -> str:
    if not auth:
        raise InvalidOption("name the file with the tokens: --auth FILE, or $TIDEMILL_AUTH")
    return auth


OLDEST = {"starlette": (0, 40), "uvicorn": (0, 30)}
"""The oldest versions that the server runs with, as in ``pyproject.toml``."""


def load_server() -> tuple[Any, Any]:
    """Import ``serve`` and the class of its settings. InvalidOption: a package is missing."""
    try:
        _check_versions()
        from tidemill.server.run import serve
        from tidemill.server.settings import Settings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tidemill"):
            raise
        raise InvalidOption(
            f"the server needs {error.name}; install it with: pip install 'tidemill[server]'"
        ) from None
    return serve, Settings


def _check_versions() -> None:
    for name, oldest in OLDEST.items():
        try:
            text = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the import reports the missing package
        if tuple(map(int, re.findall(r"\d+", text)[:2])) < oldest:
            raise InvalidOption(
                f"the server needs {name} {oldest[0]}.{oldest[1]} or later, and {text} is "
                "installed; install a later version, or run the server in an environment of its own"
            )
