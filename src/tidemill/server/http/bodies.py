"""Bodies of jobs in requests and answers; the field ``encoding`` names their form in JSON.

The decoder holds the interpreter lock, so decoding a large batch at once would stop the event loop.
Here a batch is first split into its jobs, which makes no objects, and decoded job by job.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tidemill.app import Tidemill
from tidemill.core.codec import MAX_BODY, BodyTooLarge
from tidemill.core.envelope import Envelope
from tidemill.errors import InvalidOption
from tidemill.server.delivery import value_in
from tidemill.server.http.schemas.jobs import BatchIn, JobIn
from tidemill.server.http.schemas.reservations import CompleteIn, CompleteMany

MOST_JSON = 6 * MAX_BODY + 64 * 1024
"""Bytes of JSON that a job may have: a byte of text has at most six in JSON, as ``\\u0000``."""


class _Split(Struct, forbid_unknown_fields=True):
    jobs: Annotated[list[msgspec.Raw], Meta(max_length=10_000)]


_split = msgspec.json.Decoder(_Split).decode
_job = msgspec.json.Decoder(JobIn).decode


def bytes_of(field: str, text: object) -> bytes:
    try:
        if len(text) % 4:  # type: ignore[arg-type]  # refused
            raise ValueError
        return binascii.a2b_base64(text, strict_mode=True)  # type: ignore[arg-type]  # refused
    except (TypeError, ValueError):
        raise InvalidOption(f"{field} must be base64, as the field encoding says") from None


def as_json(value: Any) -> tuple[Any, str]:
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode(), "base64"
    try:
        return msgspec.Raw(msgspec.json.encode(value)), "json"
    except (TypeError, ValueError, OverflowError, RecursionError):
        return repr(value), "repr"


def body_out(mill: Tidemill, envelope: Envelope) -> tuple[Any, str]:
    """The body of a message, or the arguments of a call as ``args`` and ``kwargs``."""
    value = value_in(envelope, mill.runtime.keys)
    return as_json(value if envelope.is_message else {"args": value[0], "kwargs": value[1]})


def check_json(size: int, where: str = "") -> None:
    if size > MOST_JSON:
        raise BodyTooLarge(
            f"{where}the job has {size:,} bytes of JSON; body, headers and tags may have "
            f"{MAX_BODY:,} bytes together. Store large data elsewhere and pass its name"
        )


def decode_job(data: bytes) -> JobIn:
    check_json(len(data))
    return _job(data)


def decode_batch(data: bytes) -> BatchIn:
    jobs: list[JobIn] = []
    for number, part in enumerate(_split(data).jobs):
        where = f"jobs[{number}]"
        check_json(len(memoryview(part)), f"{where}: ")
        try:
            jobs.append(_job(part))
        except msgspec.ValidationError as error:
            raise _placed(error, where) from None
    return BatchIn(jobs)


DECODE_LARGE: dict[Any, Callable[[bytes], Any]] = {
    JobIn: decode_job,
    BatchIn: decode_batch,
    **{kind: msgspec.json.Decoder(kind).decode for kind in (CompleteIn, CompleteMany)},
}
"""Decoders of large bodies, which keep their turn until ``Call.compute`` has handled them."""


def _placed(error: msgspec.ValidationError, where: str) -> msgspec.ValidationError:
    """The error with the place of the job in the batch, in the form of msgspec."""
    text, at, place = str(error).rpartition(" - at `")
    if not at:
        return msgspec.ValidationError(f"{error} - at `$.{where}`")
    return msgspec.ValidationError(f"{text}{at}{place.replace('$', f'$.{where}', 1)}")
