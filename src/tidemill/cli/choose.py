"""Which jobs a verb is about: the filter options, and going through all that match."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.brokers.base import Filter
from tidemill.job import Record, State

__all__ = ["every", "filter_options"]

_PAGE = 500


def filter_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the options that choose jobs; it is called with ``what``, a Filter."""

    @click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice([str(s) for s in State]),
        metavar="STATE",
        help=f"In this state; may be given again. One of: {', '.join(State)}.",
    )
    @click.option("--queue", default="", help="Of this queue.")
    @click.option("--task", default="", help="Of this task.")
    @click.option("--key", default="", help="With this key.")
    @click.option("--tag", default="", help="With this tag.")
    @click.option("--search", "text", default="", help="With this text in the arguments.")
    @functools.wraps(function)
    def verb(
        *args: Any,
        states: tuple[str, ...],
        queue: str,
        task: str,
        key: str,
        tag: str,
        text: str,
        **options: Any,
    ) -> Any:
        chosen = frozenset(map(State, states))
        what = Filter(states=chosen, queue=queue, task=task, key=key, tag=tag, text=text)
        return function(*args, what=what, **options)

    return verb


def every(mill: Tidemill, what: Filter) -> Iterator[Record]:
    """All records that match, page by page, newest first."""
    cursor = ""
    while True:
        page = mill.find(what, limit=_PAGE, cursor=cursor)
        yield from page.records
        cursor = page.cursor
        if not cursor:
            return
