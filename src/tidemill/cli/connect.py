"""The options that verbs share: ``--url`` and ``--app`` open the app or store; logging."""

from __future__ import annotations

import functools
import os
import pwd
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from tidemill.app import Tidemill
from tidemill.app_loader import load_app
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.audit import note
from tidemill.core.config import parse_url
from tidemill.core.log_output import FORMATS, LEVELS, LogSettings
from tidemill.errors import BrokerUnavailable

Verb = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])

_NEEDS = {
    **dict.fromkeys(("jobs", "job", "explain", "retry", "delete"), Feature.FAILED),
    **dict.fromkeys(("pause", "resume"), Feature.PAUSE),
    **dict.fromkeys(("bind", "unbind"), Feature.TOPICS),
    "cancel": Feature.CANCEL,
    "limit": Feature.LIMITS,
    "schedule": Feature.SCHEDULES,
    **dict.fromkeys(("workers", "profile", "alerts"), Feature.HISTORY),
    "backup": Feature.BACKUP,
}
"""The feature that each verb needs."""

_READS_ONLY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("doctor", "explain", "info", "job", "jobs", "queues", "top"), ()),
    **dict.fromkeys(("schedule list", "schedule next", "workers list", "alerts list"), ()),
    "limit": ("rate", "burst", "window", "concurrency", "breaker", "declared"),
}
"""Verbs that only read. Each of the options listed with a verb makes that verb write, too.

A verb that only reads makes no file in the store's folder, and changes no job.
"""

url_option = click.option(
    "--url",
    metavar="URL",
    help="The URL of the store with the jobs; without an app also $TIDEMILL_URL.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def app_with(help: str) -> Callable[[F], F]:
    """The option ``--app``."""
    names: dict[str, Any] = {"envvar": "TIDEMILL_APP", "show_envvar": True, "metavar": "MODULE:VAR"}
    return click.option("--app", help=help, **names)


app_option = app_with("The app whose store has the jobs.")


def with_default(names: str, kind: Any, default: Any, help: str, **more: Any) -> Callable[[F], F]:
    """An option whose help shows its default; ``names`` have spaces between them."""
    options = {"type": kind, "default": default, "show_default": True, "help": help}
    return click.option(*names.split(), **options, **more)


def store_options(function: Verb) -> Verb:
    """Give a verb ``--json``, as ``as_json``, and the options of :func:`open_options`."""
    return json_option(open_options(function))


def open_options(function: Verb) -> Verb:
    """Give a verb ``--url`` and ``--app``. The verb receives ``mill``, closed after the verb."""

    @url_option
    @app_option
    @functools.wraps(function)
    def verb(*args: Any, url: str | None, app: str | None, **options: Any) -> Any:
        with open_mill(url, app) as mill:
            return function(*args, mill=mill, **options)

    return verb


def open_mill(url: str | None, app: str | None = None, *, tasks: bool = False) -> Tidemill:
    """Open the user's app, or an app without tasks on a URL. A URL overrides an app.

    ``tasks`` is for verbs that enqueue: the user's app may then make its store.

    Raises:
        BrokerUnavailable: there is no store, and this verb must not make a store.
        FeatureMissing: the store is inside another process, or lacks a feature that the verb needs.
    """
    without_app = bool(url or not app)
    mill = Tidemill(url) if without_app else load_app(app or "")
    folder = _store_folder(mill.url)
    if (
        folder
        and (without_app or not tasks)
        and not os.path.exists(os.path.join(folder, "data.mdb"))
    ):
        raise BrokerUnavailable(
            f"there is no store in {folder} yet; name another store with --url or --app, "
            "or start with: tidemill demo"
        )
    words, given = _words()
    verb = words[0] if words else ""
    changing = _READS_ONLY.get(" ".join(words), _READS_ONLY.get(verb))
    mill.runtime.reading = changing is not None and all(
        given.get(option) in (None, False) for option in changing
    )
    mill.runtime.features.need(Feature.PROCESSES, "the command line")
    if verb in _NEEDS:
        mill.runtime.features.need(_NEEDS[verb], f"tidemill {verb}")
    return mill


def _store_folder(url: str) -> str:
    parsed = parse_url(url)
    if parsed.scheme != "lmdb":
        return ""
    return os.path.abspath(os.path.expanduser(parsed.path))


def _words() -> tuple[list[str], dict[str, Any]]:
    """The words of the verb on the command line (``schedule list``), and its options."""
    context, words = click.get_current_context(silent=True), list[str]()
    given = context.params if context is not None else {}
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name or "")
        context = context.parent
    return words, given


def audit(store: Store, what: str, target: str, count: int = 1) -> None:
    """Write an act of the command line into the audit list of the store."""
    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:  # a container may have no name for its user
        user = f"user {uid}"
    note(store, f"{user} at {socket.gethostname()}, command line", what, target, count)


def log_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options, as ``logs``. Child processes find them in the environment."""

    @click.option("-v", "--verbose", is_flag=True, help="Log in detail: --log-level debug.")
    @click.option("-q", "--quiet", is_flag=True, help="Log trouble only: --log-level warning.")
    @click.option(
        "--log-level",
        type=click.Choice(LEVELS, case_sensitive=False),
        envvar="TIDEMILL_LOG",
        show_envvar=True,
        help="The lowest level that is logged; default info.",
    )
    @click.option(
        "--log-format",
        type=click.Choice(FORMATS, case_sensitive=False),
        envvar="TIDEMILL_LOG_FORMAT",
        show_envvar=True,
        default="text",
        show_default=True,
        help="Log lines of text, or one JSON object on each line.",
    )
    @functools.wraps(function)
    def command(
        *args: Any,
        verbose: bool,
        quiet: bool,
        log_level: str | None,
        log_format: str,
        **options: Any,
    ) -> Any:
        source = click.get_current_context().get_parameter_source("log_level")
        if source is not ParameterSource.COMMANDLINE:  # a variable must not override an option
            log_level = "debug" if verbose else "warning" if quiet else log_level
        logs = LogSettings(log_level or "", log_format)
        logs.export()
        return function(*args, logs=logs, **options)

    return command
