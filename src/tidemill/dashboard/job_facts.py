"""The facts on the page of a job: full arguments, causes and relatives."""

from __future__ import annotations

import pprint
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.client.compositions import jobs_before
from tidemill.client.explain import why_ready
from tidemill.core.codec import unpack
from tidemill.core.envelope import Envelope
from tidemill.core.errors import CodecError, ResultNotKept, TidemillError
from tidemill.core.job import GROUP, Record, State
from tidemill.core.owner import Owner
from tidemill.core.scoreboard import read_runs
from tidemill.dashboard.job_list import Listed
from tidemill.dashboard.look import Look
from tidemill.dashboard.waterfall import Cause, Known

RERUN_OF = "rerun-of"
"""The header of an edited repeat of a job: the id of the original job."""

_RELATIVES_MOST = 50
_LATEST = 10
_LOOK = 3000  # jobs that the search for the latest jobs of a task reads


class Shown(msgspec.Struct, frozen=True):
    """A value as text, in full, or the reason why the value cannot be shown."""

    name: str
    text: str
    is_readable: bool = True


def call_of(envelope: Envelope) -> tuple[list[Any], dict[str, Any]]:
    """The arguments in the body of a task's job, as plain data.

    Raises:
        CodecError: the body is pickled, or cannot be decoded.
    """
    if envelope.pickled:
        raise CodecError("the arguments are pickled; only a worker with the key opens them")
    body = unpack(envelope.body) if envelope.body else [[], {}]
    if not (isinstance(body, (list, tuple)) and len(body) == 2 and isinstance(body[1], dict)):
        raise CodecError("the body is no call: another program put this job")
    return list(body[0]), dict(body[1])


def arguments_of(mill: Tidemill, envelope: Envelope) -> list[Shown]:
    """The arguments of a job, or the body of a message, each in full."""
    if envelope.is_message:
        return [_body_of(envelope)]
    try:
        args, kwargs = call_of(envelope)
        return [Shown(name, in_full(value)) for name, value in _named(mill, envelope, args, kwargs)]
    except CodecError as error:
        return [Shown("", str(error), is_readable=False)]


def _body_of(envelope: Envelope) -> Shown:
    if envelope.pickled:
        return Shown("body", "the body is pickled; only a consumer with the key opens it", False)
    try:
        return Shown("body", in_full(unpack(envelope.body)) if envelope.body else "None")
    except CodecError:
        return Shown("body", envelope.body.decode("utf-8", "backslashreplace"))


def _named(
    mill: Tidemill, envelope: Envelope, args: list[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    task = mill.tasks.get(envelope.task)
    try:
        names = [each.name for each in task.arguments.each(args, kwargs)] if task else []
    except (TypeError, IndexError):
        names = []
    for place, value in enumerate(args):
        yield names[place] if place < len(names) else f"[{place}]", value
    yield from kwargs.items()


def in_full(value: Any) -> str:
    """A value as Python text over several lines, never shortened."""
    if isinstance(value, str) and "\n" in value:
        return value
    return pprint.pformat(value, width=100, sort_dicts=False)


def result_of(record: Record) -> Shown | None:
    """The result of a job that succeeded, in full."""
    if record.state is not State.SUCCEEDED:
        return None
    try:
        return Shown("result", in_full(record.result))
    except (CodecError, ResultNotKept) as error:
        return Shown("result", str(error), is_readable=False)


# -- causes ----------------------------------------------------------------------------------------


def known_of(mill: Tidemill, record: Record, look: Look, now: float) -> Known:
    """The facts about a job that the store has besides its record, at this moment."""
    cause = cause_of(mill, record, look) if record.state is State.READY else None
    started = started_at(record, look.owners) if record.state is State.RUNNING else 0.0
    return Known(now, cause, started, _parents(mill, record))


def cause_of(mill: Tidemill, record: Record, look: Look) -> Cause:
    """Why a ready job waits at this moment."""
    queue = record.envelope.queue
    row = look.queue(queue) or QueueStats(name=queue)
    return Cause(*why_ready(mill.broker, record, row, len(look.serving(queue))))


def started_at(record: Record, owners: Sequence[Owner]) -> float:
    """When the present run of a job began, by the scoreboard of its worker; 0 if nobody knows."""
    for owner in owners:
        if owner.name == record.worker and owner.board:
            try:
                runs = read_runs(owner.board, owner.id)
            except (TidemillError, OSError):
                runs = None
            if runs and record.token in runs:
                return runs[record.token][1]
    return 0.0


# -- relatives -------------------------------------------------------------------------------------


def _parents(mill: Tidemill, record: Record) -> list[Record]:
    """The jobs that a job waits or waited for, without jobs that are no longer kept."""
    links = record.envelope.links
    if links is None:
        return []
    found = relatives(mill, links.inputs)
    return [*found, *jobs_before(mill.broker, record)][:_RELATIVES_MOST]


def relatives(mill: Tidemill, ids: Sequence[str]) -> list[Record]:
    """The jobs of these ids that are still kept; at most 50."""
    if not ids:
        return []
    found = mill.broker.wait_for(ids[:_RELATIVES_MOST], 0)
    return [record for record in found if record is not None]


def whole_of(mill: Tidemill, record: Record) -> Record | None:
    """The group, chain or flow that a job is a part of."""
    job_id = record.envelope.id
    if record.envelope.links is None:
        return None
    while "." in job_id:
        job_id = job_id.rpartition(".")[0]
        found = mill.broker.get(job_id)
        if found is not None:
            return found
    return record if record.envelope.task == GROUP else None


def other_runs(mill: Tidemill, record: Record) -> Listed:
    """The latest other jobs of the same task, or of the queue of a message."""
    envelope = record.envelope
    what = Filter(task=envelope.task, queue=envelope.queue)
    return latest_jobs(mill, what, without=envelope.id)


def latest_jobs(mill: Tidemill, what: Filter, without: str = "") -> Listed:
    """The latest jobs of a filter, apart from the job ``without``, from a short search."""
    found = mill.find(msgspec.structs.replace(what, look=_LOOK), limit=_LATEST + 1)
    records = [each for each in found.records if each.envelope.id != without][:_LATEST]
    cursor = "" if len(records) == _LATEST else found.cursor
    return Listed(records, cursor, is_full=not cursor)
