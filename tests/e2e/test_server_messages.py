"""Messages of the job server whose consumers fail, repeat themselves, or name nothing."""

from __future__ import annotations

from typing import Any

import pytest
from servers.http import JobServer


def take(server: JobServer, queue: str, timeout: float = 10) -> dict[str, Any]:
    (job,) = server.reserve(queue, timeout=timeout)
    return job


def settle(server: JobServer, job: dict[str, Any], act: str, body: Any = None) -> tuple[int, str]:
    """The status of an act, and the kind of its problem."""
    answer = server.post(f"/v1/reservations/{job['receipt']}/{act}", body)
    return answer.status, answer.json["type"].rpartition(":")[2] if answer.data else ""


@pytest.mark.everyday
def test_a_release_with_an_error_counts_and_is_shown(server: JobServer) -> None:
    # given a message whose consumer fails
    server.post("/v1/jobs", {"queue": "fails", "id": "bad", "body": 1})
    job = take(server, "fails")
    # when
    assert settle(server, job, "release", {"error": "no such user"}) == (204, "")
    # then
    found = server.get("/v1/jobs/bad").json
    assert (found["attempt"], found["error"]) == (1, "no such user")
    assert [attempt["error"] for attempt in found["attempts"]] == ["no such user"]
    # and a release without an error counts nothing, another with an error delays the message
    job = take(server, "fails")
    assert settle(server, job, "release") == (204, "")
    job = take(server, "fails")
    assert job["attempt"] == 2
    assert settle(server, job, "release", {"error": "still none"}) == (204, "")
    found = server.get("/v1/jobs/bad").json
    assert (found["state"], found["attempt"], found["error"]) == ("scheduled", 2, "still none")
    assert take(server, "fails")["attempt"] == 3


def test_a_release_with_errors_ends_a_message(server: JobServer) -> None:
    server.post("/v1/jobs", {"queue": "ends", "id": "worse", "body": 1, "retries": 1})
    for error in ("first", "last"):
        assert settle(server, take(server, "ends"), "release", {"error": error}) == (204, "")
    found = server.get("/v1/jobs/worse").json
    assert (found["state"], found["attempt"], found["error"]) == ("failed", 2, "last")


def test_a_repeated_settlement_is_told_from_a_lost_lease(server: JobServer) -> None:
    for act, again, other in [
        ("ack", (204, ""), "release"),
        ("release", (204, ""), "ack"),
        ("bury", (204, ""), "ack"),
    ]:
        queue = f"repeated-{act}"
        server.post("/v1/jobs", {"queue": queue, "body": 1})
        job = take(server, queue)
        assert settle(server, job, act) == (204, "")
        assert settle(server, job, act) == again
        for late in (other, "touch"):
            assert settle(server, job, late) == (409, "already-settled")
    # and a lease that ran out is lost
    server.post("/v1/jobs", {"queue": "late", "body": 1, "ttr": 0.1})
    job = take(server, "late")
    assert take(server, "late")["attempt"] == 2
    for act in ("ack", "release", "bury", "touch"):
        assert settle(server, job, act) == (409, "lease-lost")


def test_a_receipt_of_a_message_with_ttr_0_cannot_settle(server: JobServer) -> None:
    server.post("/v1/jobs", {"queue": "once", "body": 1, "ttr": 0})
    job = take(server, "once")
    assert job["ttr"] is None
    for act in ("ack", "release", "bury", "touch"):
        assert settle(server, job, act) == (409, "at-most-once")
    assert server.post("/v1/ack", {"receipts": [job["receipt"]]}).json == {"done": [False]}


@pytest.mark.parametrize(
    ("method", "path", "body", "detail"),
    [
        ("POST", "/v1/jobs", {"body": 1}, "queue: a message needs the name of a queue"),
        ("POST", "/v1/jobs", {"body": 1, "queue": None}, "queue: a message needs the name of"),
        ("POST", "/v1/jobs", {"body": 1, "queue": " "}, "queue: must not be blank"),
        ("POST", "/v1/jobs", {"body": 1, "queue": "a", "id": " "}, "id: must not be blank"),
        ("POST", "/v1/jobs", {"task": " "}, "task: must not be blank"),
        ("PUT", "/v1/jobs/%20", {"body": 1, "queue": "a"}, "id must not be blank"),
        ("PUT", "/v1/jobs/x", {"body": 1}, "queue: a message needs the name of a queue"),
        ("POST", "/v1/jobs/batch", {"jobs": [{"body": 1}]}, "jobs[0]: queue: a message needs"),
        ("POST", "/v1/queues/%20%20/messages", b"x", "queue must not be blank"),
        ("POST", "/v1/queues/a/messages?id=%20", b"x", "id: must not be blank"),
        ("POST", "/v1/queues/a/messages?id=", b"x", "id: expected text of length >= 1"),
        ("POST", "/v1/reserve", {"queues": [" "]}, "queues[0]: must not be blank"),
    ],
)
def test_a_blank_name_is_refused(
    server: JobServer, method: str, path: str, body: Any, detail: str
) -> None:
    answer = server.request(method, path, body)
    assert answer.status == 400, answer.data
    assert answer.json["detail"].startswith(detail)
    assert "default" not in server.get("/v1/queues").data.decode()


def test_an_empty_body_or_a_null_parameter_is_refused(server: JobServer) -> None:
    for method, path, detail in [
        ("PATCH", "/v1/queues/empty", "the body is empty; it must be JSON"),
        ("POST", "/v1/queues/a/messages?delay=null", "delay: must not be null; leave it out"),
        ("GET", "/v1/jobs?limit=NULL", "limit: must not be null; leave it out"),
    ]:
        headers = {"Content-Type": "application/json"}
        answer = server.request(method, path, headers=headers)
        assert (answer.status, answer.json["detail"]) == (400, detail)
