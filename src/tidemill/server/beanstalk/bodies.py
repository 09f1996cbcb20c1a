"""What clients see of a job, and what becomes of what they put.

put here                   a message of those bytes; or, where the port was told to, a task
bytes put elsewhere        those bytes
text                       UTF-8
other plain data           JSON
a task                     JSON: {"task": …, "args": […], "kwargs": {…}, "id": …}
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.app import Tidemill
from tidemill.arguments import TEXT_OF_BODY, summary
from tidemill.codec import pack, pack_pickle, unpack, unpack_pickle
from tidemill.errors import CodecError, InvalidOption
from tidemill.job import Envelope
from tidemill.retry import ENDLESS
from tidemill.server.beanstalk.reading import Given
from tidemill.trust import trusted

__all__ = ["envelope_of", "shown"]


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    """A task as it travels through the port."""

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    id: str = ""


_read_call = msgspec.json.Decoder(_Call).decode
_write = msgspec.json.Encoder(enc_hook=str).encode


def shown(mill: Tidemill, envelope: Envelope) -> bytes:
    """The body as a client gets it.

    Raises:
        CodecError: it is not what a put of ours wrote, or not signed though it should be.
    """
    trusted(envelope, mill.keys)
    body = unpack_pickle(envelope.body) if envelope.pickled else unpack(envelope.body)
    if envelope.task:
        args, kwargs = body
        return _json({"task": envelope.task, "args": args, "kwargs": kwargs, "id": envelope.id})
    if isinstance(body, bytes):
        return body
    return body.encode() if isinstance(body, str) else _json(body)


def _json(value: Any) -> bytes:
    try:
        return _write(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value).encode("utf-8", "backslashreplace")  # JSON has no such keys


def envelope_of(mill: Tidemill, tube: str, given: Given, job_id: str, *, tasks: bool) -> Envelope:
    """The job that was put.

    Raises:
        InvalidOption: the task cannot be called so, or the body is nested too deeply.
    """
    call = _call_in(given.body) if tasks else None
    if call is not None:
        return _task(mill, tube, given, call, job_id)
    envelope = Envelope(
        id=given.id or job_id,
        queue=tube,
        body=pack_pickle(given.body) if mill.pickles else pack(given.body),
        rank=given.rank,
        delay=given.delay,
        ttr=given.ttr,
        retries=ENDLESS,
        key=given.key,
    )
    if len(envelope.body) <= TEXT_OF_BODY:
        envelope.text = summary((given.body,), {})
    return mill.seal(envelope)


def _call_in(body: bytes) -> _Call | None:
    if not body.lstrip().startswith(b"{"):
        return None
    try:
        return _read_call(body)
    except RecursionError:
        raise InvalidOption("the body is nested too deeply") from None
    except msgspec.DecodeError:
        return None


def _task(mill: Tidemill, tube: str, given: Given, call: _Call, job_id: str) -> Envelope:
    try:
        asked = mill.call(call.task, *call.args, **call.kwargs).using(queue=tube)
        envelope = mill.envelope(asked, given.id or call.id or job_id)
    except TypeError as error:
        raise InvalidOption(f"{call.task} cannot be called so: {error}") from None
    except CodecError as error:
        raise InvalidOption(f"the arguments of {call.task} cannot be stored: {error}") from None
    envelope.rank, envelope.delay, envelope.ttr = given.rank, given.delay, given.ttr
    envelope.key = given.key or envelope.key
    return envelope  # what is signed has not changed
