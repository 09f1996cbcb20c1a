"""Which jobs a verb is about: filters, beginnings of ids, and going through all that match."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.base import Feature, Filter
from tidemill.config import MAX_NAME
from tidemill.errors import InvalidOption, JobNotFound
from tidemill.job import Record, State

__all__ = ["every", "failed_job", "filter_options", "whole_group", "whole_id"]

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

    That of a group, a chain or a flow is meant where it begins so and its parts do.

    Raises:
        InvalidOption: several jobs have ids that begin so; the sentence lists them.
    """
    if Feature.INSPECT not in mill.broker.features:
        return text
    if len(text) < _PREFIX_LEAST or len(text.encode(errors="replace")) > MAX_NAME:
        return text
    if mill.broker.get(text) is not None:
        return text
    wholes: dict[str, bool] = {}
    ids: list[str] = []
    for record in every(mill, Filter(id_prefix=text)):
        whole = _whole_of(mill, record.envelope.id, len(text), wholes)
        if whole not in ids:
            ids.append(whole)
        if len(ids) > _CANDIDATES:
            break
    if len(ids) > 1:
        more = " and more" if len(ids) > _CANDIDATES else ""
        raise InvalidOption(f"several ids begin with {text}: {', '.join(ids[:_CANDIDATES])}{more}")
    return ids[0] if ids else text  # nobody's: what follows says so


def failed_job(mill: Tidemill, text: str) -> Record:
    """The failed job whose id is given whole, or by a beginning that no other failed job has.

    Raises:
        JobNotFound: there is none; InvalidOption: several ids begin so.
    """
    failed = frozenset({State.FAILED})
    found = {r.envelope.id: r for r in every(mill, Filter(states=failed, id_prefix=text))}
    if text in found:
        return found[text]
    if len(text) < _PREFIX_LEAST or not found:
        raise JobNotFound(
            f"no failed job has the id {text!r}, and {mill.broker.url} shows failed jobs only"
        )
    if len(found) > 1:
        shown = ", ".join(list(found)[:_CANDIDATES])
        raise InvalidOption(f"{len(found)} ids of failed jobs begin with {text}: {shown}")
    return next(iter(found.values()))


def _whole_of(mill: Tidemill, job_id: str, least: int, wholes: dict[str, bool]) -> str:
    """The job this one is a part of, if that is there, and its id of so many characters at least.

    What is known of that, by id, is kept in ``wholes``.
    """
    cut = job_id.find(".", least)
    while cut > 0:
        whole = job_id[:cut]
        if whole not in wholes:
            wholes[whole] = mill.broker.get(whole) is not None
        if wholes[whole]:
            return whole
        cut = job_id.find(".", cut + 1)
    return job_id


def whole_group(mill: Tidemill, what: Filter) -> Filter:
    """The filter with the whole id of its group, where a beginning of it was given.

    Raises:
        InvalidOption: several jobs have ids that begin so.
    """
    if not what.id_prefix:
        return what
    group = whole_id(mill, what.id_prefix.removesuffix("."))
    return msgspec.structs.replace(what, id_prefix=f"{group}.")


def every(mill: Tidemill, what: Filter) -> Iterator[Record]:
    """All records that match, page by page, newest first."""
    cursor = ""
    while True:
        page = mill.find(what, limit=_PAGE, cursor=cursor)
        yield from page.records
        cursor = page.cursor
        if not cursor:
            return
