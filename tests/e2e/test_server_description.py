"""A real server takes each body that its description allows, and refuses each that it forbids."""

from __future__ import annotations

import itertools
from typing import Any

import jsonschema_rs
import pytest
from servers.http import JobServer

NAMES = itertools.count()
FUTURE = "2999-01-01T00:00:00Z"
MESSAGE: dict[str, Any] = {"queue": "a", "body": 1}
CALL: dict[str, Any] = {"task": "math.sqrt", "args": [2], "queue": "math"}
DAILY: dict[str, Any] = {**CALL, "cron": "0 6 * * *"}
LIMIT: dict[str, Any] = {"rate": "10/s"}
RESERVE: dict[str, Any] = {"queues": ["empty"]}


@pytest.fixture(scope="module")
def components(server: JobServer) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/v1/openapi.json").json["components"]
    return found


def agree(server: JobServer, components: dict[str, Any], shape: str, body: Any) -> bool:
    """What description and server both say of a body."""
    schema = {"$ref": f"#/components/schemas/{shape}", "components": components}
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    described = validator.is_valid(body)
    method, path = {
        "JobIn": ("POST", "/v1/jobs"),
        "ScheduleIn": ("PUT", f"/v1/schedules/{next(NAMES)}"),
        "QueueLimitIn": ("PATCH", f"/v1/queues/{next(NAMES)}/limit"),
        "ReserveIn": ("POST", "/v1/reserve"),
        "RetryIn": ("POST", "/v1/queues/a/retry"),
        "AlterMany": ("POST", "/v1/jobs/alter"),
    }[shape]
    answer = server.request(method, path, body)
    assert (answer.status != 400) == described, answer
    assert described == (answer.status in (200, 201)), answer
    return described


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        ("JobIn", MESSAGE | {"args": [], "kwargs": {}, "timeout": None}),
        ("JobIn", MESSAGE | {"body": "AAA=", "encoding": "base64"}),
        ("JobIn", MESSAGE | {"body": "", "encoding": "base64"}),
        ("JobIn", MESSAGE | {"at": FUTURE, "delay": None}),
        ("JobIn", MESSAGE | {"at": 1.5}),
        ("JobIn", MESSAGE | {"key": "k1", "on_conflict": "replace", "max_wait": 5}),
        ("JobIn", MESSAGE | {"key": "k2", "hold": 5}),
        ("JobIn", MESSAGE | {"hold": 0, "max_wait": 0.0}),
        ("JobIn", MESSAGE | {"retries": 3.0}),
        ("JobIn", MESSAGE | {"tags": [" a b", "é" * 100]}),
        ("JobIn", MESSAGE | {"limit": "0.5/1.5h"}),
        ("JobIn", CALL | {"timeout": 5, "result_ttl": 0}),
        ("JobIn", CALL | {"key": "k3", "on_conflict": "merge"}),
        ("JobIn", CALL | {"key": "k4", "on_conflict": "merge", "hold": 5}),
        ("ScheduleIn", DAILY | {"zone": "Europe/Berlin", "start": "2030-01-01T00:00:00+01:00"}),
        ("ScheduleIn", DAILY | {"start": FUTURE, "repeats": 3.0, "every": None}),
        ("ScheduleIn", DAILY | {"cron": "@daily", "end": 2.0**36}),
        ("ScheduleIn", DAILY | {"zone": "Europe/Berlin", "end": "2999-01-01T00:00:00"}),
        ("ScheduleIn", CALL | {"zone": "Europe/Berlin", "at": "2999-01-01T00:00:00.5"}),
        ("ScheduleIn", DAILY | {"end": "9999-12-31T23:59:59-23:59"}),
        ("ScheduleIn", CALL | {"every": "15 minutes"}),
        ("ScheduleIn", CALL | {"every": "0.5hour", "jitter": 5}),
        ("ScheduleIn", CALL | {"every": 0.01, "start": "2030-01-01T00:00:00+01:00"}),
        ("ScheduleIn", CALL | {"at": FUTURE, "catch_up": True}),
        ("QueueLimitIn", LIMIT | {"burst": 5, "window": "7/3d"}),
        ("QueueLimitIn", {"concurrency": 2.0, "burst": None}),
        ("QueueLimitIn", {"breaker": {"failures": 3.0}}),
        ("ReserveIn", RESERVE | {"count": 2.0}),
        ("RetryIn", {"count": 7.0}),
        ("AlterMany", {"ids": ["a"], "to_priority": -2.5}),
        ("AlterMany", {"ids": [], "to_queue": "b", "to_priority": None}),
    ],
)
def test_answers_have_the_described_shapes(
    server: JobServer, components: dict[str, Any], shape: str, body: Any
) -> None:
    assert agree(server, components, shape, body)


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        ("JobIn", {}),
        ("JobIn", {"body": 1}),
        ("JobIn", MESSAGE | CALL),
        ("JobIn", MESSAGE | {"args": [1]}),
        ("JobIn", MESSAGE | {"result_ttl": 0}),
        ("JobIn", MESSAGE | {"body": "AAAA=", "encoding": "base64"}),
        ("JobIn", MESSAGE | {"body": 1, "encoding": "base64"}),
        ("JobIn", MESSAGE | {"at": FUTURE, "delay": 0}),
        ("JobIn", MESSAGE | {"at": 0}),
        ("JobIn", MESSAGE | {"at": "1969-01-01T00:00:00Z"}),
        ("JobIn", MESSAGE | {"at": "9999-12-31T23:59:59-23:59"}),
        ("JobIn", MESSAGE | {"at": "2030-01-01T00:00:00"}),
        ("JobIn", MESSAGE | {"on_conflict": "keep"}),
        ("JobIn", MESSAGE | {"hold": 5}),
        ("JobIn", MESSAGE | {"key": "k", "on_conflict": "replace", "hold": 5}),
        ("JobIn", MESSAGE | {"key": "k", "max_wait": 5}),
        ("JobIn", MESSAGE | {"retries": 3.5}),
        ("JobIn", MESSAGE | {"tags": ["a\tb"]}),
        ("JobIn", MESSAGE | {"tags": ["  "]}),
        ("JobIn", MESSAGE | {"limit": "10"}),
        ("JobIn", MESSAGE | {"limit": "1/0s"}),
        ("JobIn", CALL | {"ttr": 5}),
        ("JobIn", CALL | {"key": "k", "on_conflict": "replace", "hold": 5}),
        ("AlterMany", {"ids": ["a"]}),
        ("AlterMany", {"ids": ["a"], "to_queue": None, "to_priority": None}),
        ("AlterMany", {"ids": ["a"], "to_priority": 101}),
        ("AlterMany", {"ids": ["a"], "to_queue": ""}),
        ("ScheduleIn", CALL),
        ("ScheduleIn", DAILY | {"every": 5}),
        ("ScheduleIn", DAILY | {"start": "2030-01-01T00:00:00+01:00"}),
        ("ScheduleIn", DAILY | {"start": "0001-01-01T00:00:00Z"}),
        ("ScheduleIn", CALL | {"at": "9999-12-31T23:59:59-23:59"}),
        ("ScheduleIn", DAILY | {"end": "2999-01-01T00:00:00"}),
        ("ScheduleIn", CALL | {"every": 60, "start": "2999-01-01T00:00:00"}),
        ("ScheduleIn", CALL | {"at": "2999-01-01T00:00:00"}),
        ("ScheduleIn", DAILY | {"cron": "0 6 * *"}),
        ("ScheduleIn", DAILY | {"zone": ""}),
        ("ScheduleIn", DAILY | {"repeats": 0}),
        ("ScheduleIn", DAILY | {"end": "1970-01-01T00:00:00Z"}),
        ("ScheduleIn", CALL | {"every": 0}),
        ("ScheduleIn", CALL | {"every": "1.5 days"}),
        ("ScheduleIn", CALL | {"every": "٣ days"}),
        ("ScheduleIn", CALL | {"every": 1e10}),
        ("ScheduleIn", CALL | {"at": FUTURE, "repeats": 1}),
        ("QueueLimitIn", {}),
        ("QueueLimitIn", {"rate": None, "burst": 5}),
        ("QueueLimitIn", {"window": "1.5/s"}),
        ("QueueLimitIn", {"breaker": {"failures": 0}}),
        ("QueueLimitIn", {"concurrency": -1}),
        ("ReserveIn", {"queues": ["a\x9b"]}),
        ("ReserveIn", RESERVE | {"count": 1.5}),
    ],
)
def test_a_request_outside_the_description_is_refused(
    server: JobServer, components: dict[str, Any], shape: str, body: Any
) -> None:
    assert not agree(server, components, shape, body)


def test_a_text_that_is_not_base64_is_refused_with_its_field(server: JobServer) -> None:
    server.post("/v1/jobs", {"task": "base64.task", "queue": "base64"})
    reserved = server.post("/v1/tasks/reserve", {"tasks": ["base64.task"], "queues": ["base64"]})
    (job,) = reserved.json["jobs"]
    path = f"/v1/reservations/{job['receipt']}/complete"
    answer = server.post(path, {"result": "AAAA=", "encoding": "base64"})
    assert answer.status == 400
    assert answer.json["detail"] == "result must be base64, as the field encoding says"
    assert server.post(path, {"result": "AAAA", "encoding": "base64"}).status == 204


def test_a_conflict_is_409(server: JobServer) -> None:
    past = server.put("/v1/schedules/past", CALL | {"at": "2000-01-01T00:00:00Z"})
    assert (past.status, past.json["type"]) == (409, "urn:tidemill:problem:conflict")
    path = "/v1/queues/burst/limit"
    burst = server.request("PATCH", path, {"burst": 5})
    assert (burst.status, burst.json["type"]) == (409, "urn:tidemill:problem:conflict")
    assert server.request("PATCH", path, {"rate": "10/s"}).status == 200
    assert server.request("PATCH", path, {"burst": 5}).json["burst"] == 5
