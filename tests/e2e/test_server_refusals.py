"""What a real server refuses: with the right status, in one form, with a sentence that helps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servers.http import Answer, JobServer

PROBLEM = "urn:tidemill:problem:"


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    server = JobServer("--quiet")
    yield server
    server.close()


def refused(answer: Answer, status: int, kind: str) -> str:
    """The sentence of a problem, which has the form of all problems."""
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json")
    document = answer.json
    assert (document["status"], document["type"]) == (status, PROBLEM + kind)
    assert document["request_id"] == answer.headers["x-request-id"]
    return str(document["detail"])


# -- too large ------------------------------------------------------------------------------------


LARGE = "x" * (1 << 20)  # with the quotes it is too long


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/jobs", {"body": LARGE}),
        ("POST", "/v1/jobs", {"task": "math.sqrt", "args": [LARGE]}),
        ("PUT", "/v1/jobs/large", {"body": LARGE}),
        ("POST", "/v1/jobs/batch", {"jobs": [{"body": 1}, {"body": LARGE}]}),
        ("POST", "/v1/queues/large/messages", LARGE.encode() + b"!"),
        ("PUT", "/v1/schedules/large", {"task": "math.sqrt", "args": [LARGE], "every": 60}),
    ],
)
def test_a_job_that_is_too_large_is_413(
    server: JobServer, method: str, path: str, body: Any
) -> None:
    detail = refused(server.request(method, path, body), 413, "too-large")
    assert "1,048,576 is the most; store large data elsewhere" in detail
    assert detail.startswith("jobs[1]: ") == path.endswith("batch")


def test_a_request_that_is_too_large_is_413(server: JobServer) -> None:
    answer = server.post("/v1/jobs/batch", b" " * ((16 << 20) + 1))
    assert "16,777,216 bytes, which is the most; send it in several" in refused(
        answer, 413, "too-large"
    )
