"""Large batches of jobs are decoded job by job, with the same outcome as at once."""

from __future__ import annotations

import msgspec
import pytest

from tidemill.core.codec import BodyTooLarge
from tidemill.server.http.bodies import MOST_JSON, decode_batch, decode_job
from tidemill.server.http.schemas.jobs import BatchIn
from tidemill.server.http.validation_errors import validation_message

AT_ONCE = msgspec.json.Decoder(BatchIn).decode


@pytest.mark.parametrize(
    "data",
    [
        b'{"jobs": []}',
        b'{"jobs": [{"queue": "a", "body": {"b": [1, "\xc3\xa9"]}}, {"task": "t", "args": [1]}]}',
        b'{"jobs": [{"body": 1}, {"on_conflict": "x"}]}',
        b'{"jobs": [1]}',
        b'{"jobs": [{"args": 1}]}',
        b'{"jobs": [{"body": 1}, {"x": 1}]}',
        b'{"jobs": [{"headers": {"a": 1}}]}',
        b'{"jobs": [{"queue": " "}]}',
        b'{"jobs": 3}',
        b'{"job": []}',
        b'{"jobs": [{"body": 1},]}',
        b'{"jobs": [{"body": 1}',
        b"[]",
    ],
)
def test_a_batch_decoded_job_by_job_is_the_same_as_decoded_at_once(data: bytes) -> None:
    def outcome(decode: object) -> object:
        try:
            return decode(data)  # type: ignore[operator]
        except msgspec.MsgspecError as error:
            return validation_message(error, BatchIn)

    assert outcome(decode_batch) == outcome(AT_ONCE)


def test_a_batch_has_a_maximum_of_jobs() -> None:
    data = b'{"jobs": [%s]}' % b",".join([b"{}"] * 10_001)
    with pytest.raises(msgspec.ValidationError, match="10000"):
        decode_batch(data)


def test_json_that_is_too_large_for_any_job_is_refused() -> None:
    # given the longest JSON that a job of 1 MiB may have
    fits = b'{"queue": "a", "body": "%s"}' % (rb"\u0000" * (1 << 20))
    assert len(fits) < MOST_JSON
    assert decode_job(fits).body == "\0" * (1 << 20)
    # then more is refused, with its place
    large = b'{"body": "%s"}' % (b"x" * MOST_JSON)
    with pytest.raises(BodyTooLarge, match=r"^the job has 6,"):
        decode_job(large)
    with pytest.raises(BodyTooLarge, match=r"^jobs\[1\]: the job has 6,"):
        decode_batch(b'{"jobs": [{"body": 1}, %s]}' % large)
