"""Which app or store a verb speaks to: the options for it, and opening it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.brokers.base import Feature
from tidemill.config import parse_url
from tidemill.errors import BrokerUnavailable
from tidemill.loader import load_app

__all__ = ["json_option", "open_mill", "store_options"]

Verb = Callable[..., Any]

_NEEDS = {
    **dict.fromkeys(("jobs", "job", "explain", "retry", "delete"), Feature.FAILED),
    **dict.fromkeys(("pause", "resume"), Feature.PAUSE),
    "cancel": Feature.CANCEL,
    "limit": Feature.LIMITS,
    "schedule": Feature.SCHEDULES,
    "backup": Feature.BACKUP,
}
"""What a verb is nothing without; some others can do a part of their work."""

_LOOKING: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("doctor", "explain", "info", "job", "jobs", "queues"), ()),
    **dict.fromkeys(("schedule list", "schedule next"), ()),
    "limit": ("rate", "burst", "window", "concurrency", "breaker", "declared"),
}
"""Verbs that only look unless one of these options is given.

They make no file in the store's folder, and change no job.
"""

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


def store_options(function: Verb) -> Verb:
    """Give a verb ``--url`` and ``--app``; it is called with ``mill``, closed afterwards."""

    @click.option("--url", default=None, metavar="URL", help="Where the jobs live.")
    @click.option(
        "--app",
        default=None,
        envvar="TIDEMILL_APP",
        metavar="MODULE:VAR",
        help="The app whose jobs they are.",
    )
    @functools.wraps(function)
    def verb(*args: Any, url: str | None, app: str | None, **options: Any) -> Any:
        with open_mill(url, app) as mill:
            return function(*args, mill=mill, **options)

    return verb


def open_mill(url: str | None, app: str | None = None, *, tasks: bool = False) -> Tidemill:
    """An app on an existing store: the user's own, or a bare one on a URL. A URL beats an app.

    With ``tasks`` it is to enqueue: the user's app may make its store, a bare one takes any task.

    Raises:
        BrokerUnavailable: there is no store; looking at one must not make one.
        FeatureMissing: the store lives inside one process, which is not this one; or it has not
            what the verb is about.
    """
    bare = bool(url or not app)
    mill = Tidemill(url, allow_imports=["*"] * tasks) if bare else load_app(app or "")
    folder = _store_folder(mill.url)
    if folder and (bare or not tasks) and not os.path.exists(os.path.join(folder, "data.mdb")):
        raise BrokerUnavailable(
            f"there is no store in {folder} yet; name another with --url or --app, "
            "or start with: tidemill demo"
        )
    words, given = _words()
    verb = words[0] if words else ""
    changing = _LOOKING.get(" ".join(words), _LOOKING.get(verb))
    mill.looking = changing is not None and all(
        given.get(option) in (None, False) for option in changing
    )
    mill.features.need(Feature.PROCESSES, "the command line")
    if verb in _NEEDS:
        mill.features.need(_NEEDS[verb], f"tidemill {verb}")
    return mill


def _store_folder(url: str) -> str:
    """The folder of an LMDB store, also behind a carrier; empty for any other store."""
    parsed = parse_url(url)
    if parsed.options.get("store"):
        return _store_folder(parsed.options["store"])
    if parsed.scheme != "lmdb":
        return ""
    return os.path.abspath(os.path.expanduser(parsed.path))


def _words() -> tuple[list[str], dict[str, Any]]:
    """The verb on the command line and the one below it (``schedule list``); its options."""
    context, words = click.get_current_context(silent=True), list[str]()
    given = context.params if context is not None else {}
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name or "")
        context = context.parent
    return words, given
