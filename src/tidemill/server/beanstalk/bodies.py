"""Bodies: jobs as the clients of the port see them.

A put makes a message of its bytes, or a call of a task if the port serves tasks. A client gets:

bytes                      as they are
text                       as UTF-8
other plain data           as JSON
a task                     as JSON: {"task": …, "args": […], "kwargs": {…}, "id": …}
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.app import Tidemill
from tidemill.client.arguments import TEXT_OF_BODY, summary
from tidemill.core.codec import pack, pack_pickle
from tidemill.core.envelope import Envelope
from tidemill.core.retry import ENDLESS
from tidemill.errors import CodecError, InvalidOption
from tidemill.server.beanstalk.parser import PutJob
from tidemill.server.delivery import value_in


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a task in the body of a job."""

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    id: str = ""


_read_call = msgspec.json.Decoder(Call).decode
_write = msgspec.json.Encoder(enc_hook=str).encode


def body_of(mill: Tidemill, envelope: Envelope) -> bytes:
    body = value_in(envelope, mill.runtime.keys)
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
        return repr(value).encode("utf-8", "backslashreplace")  # JSON cannot hold the value


def envelope_of(mill: Tidemill, tube: str, job: PutJob, job_id: str, call: Call | None) -> Envelope:
    """The job of a put: a message, or the call in its body."""
    if call is not None:
        return _task(mill, tube, job, call, job_id)
    envelope = Envelope(
        id=job.id or job_id,
        queue=tube,
        body=pack_pickle(job.body) if mill.runtime.pickles else pack(job.body),
        rank=job.rank,
        delay=job.delay,
        ttr=job.ttr,
        retries=ENDLESS,
        key=job.key,
    )
    if len(envelope.body) <= TEXT_OF_BODY:
        envelope.text = summary((job.body,), {})
    return mill.runtime.seal(envelope)


def call_in(body: bytes) -> Call | None:
    if not body.lstrip().startswith(b"{"):
        return None
    try:
        return _read_call(body)
    except RecursionError:
        raise InvalidOption("the body is nested too deeply") from None
    except msgspec.DecodeError:
        return None


def _task(mill: Tidemill, tube: str, job: PutJob, call: Call, job_id: str) -> Envelope:
    try:
        asked = mill.call(call.task, *call.args, **call.kwargs).using(queue=tube)
        envelope = mill.runtime.envelope(asked, job.id or call.id or job_id)
    except (TypeError, CodecError) as error:  # the text of the error names the task
        raise InvalidOption(str(error)) from None
    envelope.rank, envelope.delay, envelope.ttr = job.rank, job.delay, job.ttr
    envelope.key = job.key or envelope.key
    return envelope  # its signature stays valid: it does not cover these four fields
