"""Large bodies with jobs: checked by their size, and decoded job by job.

The decoder holds the interpreter lock, so decoding a large batch at once would stop the event loop.
Here a batch is first split into its jobs, which makes no objects. Other threads run between two
jobs.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from tidemill.core.config import MAX_BODY, BodyTooLarge
from tidemill.server.http.schemas.jobs import BatchIn, JobIn

MOST_JSON = 6 * MAX_BODY + 64 * 1024
"""Bytes of JSON that a job may have: a byte of text has at most six in JSON, as ``\\u0000``."""


class _Split(Struct, forbid_unknown_fields=True):
    jobs: Annotated[list[msgspec.Raw], Meta(max_length=10_000)]


_split = msgspec.json.Decoder(_Split).decode
_job = msgspec.json.Decoder(JobIn).decode


def check_json(size: int, where: str = "") -> None:
    """Check the size of a job's JSON.

    Raises:
        BodyTooLarge: the JSON has more bytes than any job may have.
    """
    if size > MOST_JSON:
        raise BodyTooLarge(
            f"{where}the job has {size:,} bytes of JSON; body, headers and tags may have "
            f"{MAX_BODY:,} bytes together. Store large data elsewhere and pass its name"
        )


def decode_job(data: bytes) -> JobIn:
    """Decode the job in a body.

    Raises:
        BodyTooLarge: the body is too large; msgspec.MsgspecError: the body is invalid.
    """
    check_json(len(data))
    return _job(data)


def decode_batch(data: bytes) -> BatchIn:
    """Decode the jobs in a body.

    Raises:
        BodyTooLarge: a job is too large; msgspec.MsgspecError: the body is invalid.
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
    """The error with the place of the job in the batch, in the form of msgspec."""
    text, at, place = str(error).rpartition(" - at `")
    if not at:
        return msgspec.ValidationError(f"{error} - at `$.{where}`")
    return msgspec.ValidationError(f"{text}{at}{place.replace('$', f'$.{where}', 1)}")
