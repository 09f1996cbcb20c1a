"""Select jobs for a verb: by filters, by ids, or by the beginning or the ending of an id."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.search import states_of
from tidemill.core.clock import id_time
from tidemill.core.config import MAX_NAME
from tidemill.core.job import Record, State
from tidemill.errors import InvalidOption, JobNotFound

_PAGE = 500
_PART_LEAST = 4
"""The least number of characters in a part of an id, as in git.

A shorter text counts as a whole id, because users may choose short ids that are parts of other ids.
"""
_CANDIDATES = 5


def filter_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the options that select jobs. The verb gets ``what``, a ``Filter``."""

    @click.option(
        "--state",
        "states",
        multiple=True,
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
    def verb(*args: Any, states: tuple[str, ...], group: str, **options: Any) -> Any:
        given = {name: options.pop(name) for name in ("queue", "task", "key", "tag", "text")}
        prefix = f"{group}." if group else ""
        what = Filter(states=states_of(states), id_prefix=prefix, **given)
        return function(*args, what=what, **options)

    return verb


def whole_id(mill: Tidemill, text: str) -> str:
    """The full id of a job, from its id, or from a beginning or an ending that no other id has.

    If an id begins with the text, endings are not compared. Endings are compared for the newest
    :data:`~tidemill.brokers.contract.inspection.LOOK_MOST` jobs. If the text is a beginning of the
    id of a group, chain or flow, the result is that id, although the ids of its jobs begin with the
    text, too.

    Raises:
        InvalidOption: several ids begin or end with the text; the error lists them.
    """
    if len(text) < _PART_LEAST or len(text.encode(errors="replace")) > MAX_NAME:
        return text
    if Feature.INSPECT not in mill.broker.features:
        # A search reads all failed jobs. A whole id that tidemill made needs no search.
        found = [] if id_time(text) is not None else [*_failed(mill, text)]
    elif mill.broker.get(text) is not None:
        return text
    else:
        found = _that_begin(mill, text) or _that_end(mill, text)
    return _only(text, found) if found else text  # the caller reports that no job has this id


def _that_begin(mill: Tidemill, text: str) -> list[str]:
    known: dict[str, bool] = {}
    ids: list[str] = []
    for record in every(mill, Filter(id_prefix=text)):
        whole = _whole_of(mill, record.envelope.id, len(text), known)
        if whole not in ids:
            ids.append(whole)
        if len(ids) > _CANDIDATES:
            break
    return ids


def _that_end(mill: Tidemill, text: str) -> list[str]:
    page = mill.broker.find(Filter(id_suffix=text), _CANDIDATES + 1)
    return [record.envelope.id for record in page.records]


def _only(text: str, ids: list[str]) -> str:
    if len(ids) > 1:
        how = "begin" if ids[0].startswith(text) else "end"
        more = " and more" if len(ids) > _CANDIDATES else ""
        raise InvalidOption(f"several ids {how} with {text}: {', '.join(ids[:_CANDIDATES])}{more}")
    return ids[0]


def _failed(mill: Tidemill, text: str) -> dict[str, Record]:
    """The failed jobs whose ids equal this text, or begin or end with this text."""
    jobs = {r.envelope.id: r for r in every(mill, Filter(states=frozenset({State.FAILED})))}
    if text in jobs or len(text) < _PART_LEAST:
        return {text: jobs[text]} if text in jobs else {}
    begin = {job_id: jobs[job_id] for job_id in jobs if job_id.startswith(text)}
    return begin or {job_id: jobs[job_id] for job_id in jobs if job_id.endswith(text)}


def failed_job(mill: Tidemill, text: str) -> Record:
    """A failed job, by its id or a unique part. Raises JobNotFound or InvalidOption."""
    found = _failed(mill, text)
    if not found:
        raise JobNotFound(
            f"no failed job has the id {text!r}, and {mill.broker.url} shows failed jobs only"
        )
    return found[_only(text, list(found))]


def _whole_of(mill: Tidemill, job_id: str, least: int, known: dict[str, bool]) -> str:
    """The id of the group, chain or flow of a job, or the job's own id."""
    # The result has at least ``least`` characters. ``known`` caches the lookups.
    cut = job_id.find(".", least)
    while cut > 0:
        whole = job_id[:cut]
        if whole not in known:
            known[whole] = mill.broker.get(whole) is not None
        if known[whole]:
            return whole
        cut = job_id.find(".", cut + 1)
    return job_id


def whole_group(mill: Tidemill, what: Filter) -> Filter:
    """The filter with the full id of its group. Raises InvalidOption for several groups."""
    if not what.id_prefix:
        return what
    group = whole_id(mill, what.id_prefix.removesuffix("."))
    return msgspec.structs.replace(what, id_prefix=f"{group}.")


def every(mill: Tidemill, what: Filter) -> Iterator[Record]:
    """All matching records, those of groups too, page by page, newest first."""
    cursor = ""
    while True:
        page = mill.broker.find(what, _PAGE, cursor)
        yield from page.records
        cursor = page.cursor
        if not cursor:
            return
