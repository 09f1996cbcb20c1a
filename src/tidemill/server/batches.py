"""Large bodies that describe jobs: refused by their size, and decoded job by job.

The decoder holds the interpreter lock, so a thread that decodes a large batch at once keeps the
event loop waiting. Here the batch is split into its jobs first, which makes no objects, and other
threads have their turn between two jobs.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from tidemill.config import MAX_BODY, BodyTooLarge
from tidemill.server.shapes.jobs import BatchIn, JobIn

__all__ = ["MOST_JSON", "check_json", "decode_batch", "decode_job"]

MOST_JSON = 6 * MAX_BODY + 64 * 1024
"""Bytes of JSON beyond which no job has room: a byte of text has six at most, as ``\\u0000``."""


class _Split(Struct, forbid_unknown_fields=True):
    jobs: Annotated[list[msgspec.Raw], Meta(max_length=10_000)]


_split = msgspec.json.Decoder(_Split).decode
_job = msgspec.json.Decoder(JobIn).decode


def check_json(size: int, where: str = "") -> None:
    """Refuse the JSON of a job by its number of bytes.

    Raises:
        BodyTooLarge: no job may have so many.
    """
    if size > MOST_JSON:
        raise BodyTooLarge(
            f"{where}the job has {size:,} bytes of JSON, and body, headers and tags may have "
            f"{MAX_BODY:,} bytes together; store large data elsewhere and pass its name"
        )


def decode_job(data: bytes) -> JobIn:
    """A job of a body.

    Raises:
        BodyTooLarge: it has too many bytes; msgspec.MsgspecError: it is none.
    """
    check_json(len(data))
    return _job(data)


def decode_batch(data: bytes) -> BatchIn:
    """The jobs of a body.

    Raises:
        BodyTooLarge: one has too many bytes; msgspec.MsgspecError: these are none.
    """
    jobs: list[JobIn] = []
    for number, part in enumerate(_split(data).jobs):
        where = f"jobs[{number}]"
        check_json(len(memoryview(part)), f"{where}: ")
        try:
            jobs.append(_job(part))
        except msgspec.ValidationError as error:
            raise _placed(error, where) from None
    return BatchIn(jobs)


def _placed(error: msgspec.ValidationError, where: str) -> msgspec.ValidationError:
    """The error as the decoder of the whole batch says it."""
    text, at, place = str(error).rpartition(" - at `")
    if not at:
        return msgspec.ValidationError(f"{error} - at `$.{where}`")
    return msgspec.ValidationError(f"{text}{at}{place.replace('$', f'$.{where}', 1)}")
