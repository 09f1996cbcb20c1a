"""Which jobs a verb is about: filters, beginnings of ids, and going through all that match."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.brokers.base import Filter
from tidemill.config import MAX_NAME
from tidemill.errors import InvalidOption
from tidemill.job import Record, State

__all__ = ["every", "filter_options", "whole_id"]

_PAGE = 500
_PREFIX_LEAST = 4
"""Characters, as with git; people's own ids may be short and begin one another."""
_CANDIDATES = 5


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
    @click.option("--group", default="", metavar="ID", help="A part of this group, chain or flow.")
    @click.option("--search", "text", default="", help="With this text in the arguments.")
    @functools.wraps(function)
    def verb(
        *args: Any,
        states: tuple[str, ...],
        queue: str,
        task: str,
        key: str,
        tag: str,
        group: str,
        text: str,
        **options: Any,
    ) -> Any:
        what = Filter(
            states=frozenset(map(State, states)),
            queue=queue,
            task=task,
            key=key,
            tag=tag,
            text=text,
            id_prefix=f"{group}." if group else "",
        )
        return function(*args, what=what, **options)

    return verb


def whole_id(mill: Tidemill, text: str) -> str:
    """The id of a job that was given whole, or by a beginning that no other id has.

    Raises:
        InvalidOption: several jobs have ids that begin so; the sentence lists them.
    """
    if len(text) < _PREFIX_LEAST or len(text.encode(errors="replace")) > MAX_NAME:
        return text
    if mill.broker.get(text) is not None:
        return text
    page = mill.find(Filter(id_prefix=text), limit=_CANDIDATES + 1)
    ids = [record.envelope.id for record in page.records]
    if len(ids) > 1:
        more = " and more" if len(ids) > _CANDIDATES else ""
        raise InvalidOption(f"several ids begin with {text}: {', '.join(ids[:_CANDIDATES])}{more}")
    return ids[0] if ids else text  # nobody's: what follows says so


def every(mill: Tidemill, what: Filter) -> Iterator[Record]:
    """All records that match, page by page, newest first."""
    cursor = ""
    while True:
        page = mill.find(what, limit=_PAGE, cursor=cursor)
        yield from page.records
        cursor = page.cursor
        if not cursor:
            return
