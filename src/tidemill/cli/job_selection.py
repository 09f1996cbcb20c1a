"""Select jobs for a verb: by filters, by ids, or by the beginning of an id."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.config import MAX_NAME
from tidemill.core.errors import InvalidOption, JobNotFound
from tidemill.core.job import Record, State

__all__ = ["every", "failed_job", "filter_options", "whole_group", "whole_id"]

_PAGE = 500
_PREFIX_LEAST = 4
"""Characters, as in git. Users' own ids may be short, and one may be the beginning of another."""
_CANDIDATES = 5


def filter_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the options that select jobs. The verb gets ``what``, a ``Filter``."""

    @click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice([str(s) for s in State]),
        metavar="STATE",
        help=f"Jobs in this state; repeat it for more states. One of: {', '.join(State)}.",
    )
    @click.option("--queue", default="", help="Jobs of this queue.")
    @click.option("--task", default="", help="Jobs of this task.")
    @click.option("--key", default="", help="Jobs with this key.")
    @click.option("--tag", default="", help="Jobs with this tag.")
    @click.option("--group", default="", metavar="ID", help="Jobs of this group, chain or flow.")
    @click.option("--search", "text", default="", help="Jobs with this text in the arguments.")
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
    """The full id of a job, from its id or from a beginning that no other id has.

    When the parts of a group, a chain or a flow match, the id of the whole is meant.

    Raises:
        InvalidOption: several ids begin like this; the text lists them.
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
    return ids[0] if ids else text  # no job has this id: the next call reports that


def failed_job(mill: Tidemill, text: str) -> Record:
    """A failed job, by its id or by a beginning that no other failed job's id has.

    Raises:
        JobNotFound: there is no such job.
        InvalidOption: several ids begin like this.
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
    """The id of the group, chain or flow of a job, or the job's own id.

    The id has ``least`` characters or more. ``wholes`` remembers the ids that were looked up.
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
    """The filter with the full id of its group, if it has only the beginning of the id.

    Raises:
        InvalidOption: several ids begin like this.
    """
    if not what.id_prefix:
        return what
    group = whole_id(mill, what.id_prefix.removesuffix("."))
    return msgspec.structs.replace(what, id_prefix=f"{group}.")


def every(mill: Tidemill, what: Filter) -> Iterator[Record]:
    """All matching records, page by page, newest first."""
    cursor = ""
    while True:
        page = mill.find(what, limit=_PAGE, cursor=cursor)
        yield from page.records
        cursor = page.cursor
        if not cursor:
            return
