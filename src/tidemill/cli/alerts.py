"""``tidemill alerts``: watch a store by rules, list what is wrong, and send a test."""

from __future__ import annotations

import signal
import socket
import threading
from typing import TYPE_CHECKING

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.cli import console
from tidemill.cli.connect import json_option, log_options, open_options, store_options
from tidemill.core.clock import clock
from tidemill.core.log_output import LogSettings, log_output
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from tidemill.alerts.rules import Rules

_RULES = click.argument(
    "rules", envvar="TIDEMILL_ALERTS", metavar="RULES", type=click.Path(dir_okay=False)
)


@click.group()
def alerts() -> None:
    """Watch a store by rules, and tell a webhook or a command.

    A TOML file has the rules.

    $TIDEMILL_ALERTS can name the file.
    """


@alerts.command()
@_RULES
@log_options
@open_options
def run(mill: Tidemill, rules: str, logs: LogSettings) -> None:
    """Watch until TERM or INT. Each alert is told once when it begins and once when it ends.

    tidemill server --alerts RULES does the same beside its other work.
    """
    from tidemill.alerts.watch import Watch

    with log_output(logs):
        watch, over = Watch(mill, _read(rules)), threading.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: over.set())
        watch.start()
        over.wait()
        watch.close()


@alerts.command(name="list")
@store_options
def list_(mill: Tidemill, as_json: bool) -> None:
    """List the active alerts."""
    from tidemill.alerts.state import alerts as read

    found = sorted(read(mill).values(), key=lambda alert: alert.began)
    cells = [
        (
            *(alert.rule, console.ago(alert.began), console.ago(alert.told_at)),
            "over" if alert.ended else alert.text,
        )
        for alert in found
    ]
    columns = ("alert", "for#", "told#?", "what…")
    document = {"alerts": [msgspec.to_builtins(alert) for alert in found]}
    console.answer_table(document, as_json, columns, cells, "no alert is on")


@alerts.command()
@_RULES
@json_option
def test(rules: str, as_json: bool) -> None:
    """Send a test alert to the target of the rules. Exit code 1 if nobody could be told."""
    from tidemill.alerts.send import Message, SendFailed, send

    target, now = _read(rules).send, clock.wall()
    message = Message(
        event="test",
        text="test: alerts of tidemill arrive here",
        rule="test",
        when="test",
        queue="",
        value=0.0,
        above=0.0,
        began=now,
        at=now,
        store="",
        host=socket.gethostname(),
    )
    where = target.webhook or target.command[0]
    try:
        send(msgspec.structs.replace(target, tries=1), message, threading.Event())
    except SendFailed as error:
        raise TidemillError(f"the test alert did not reach {where}: {error}") from error
    console.answer({"sent": where}, as_json, f"sent a test alert to {where}")


def _read(path: str) -> Rules:
    from tidemill.alerts.rules import read_rules

    return read_rules(path)
