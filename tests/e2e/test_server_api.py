"""The JSON API of a real server: jobs, messages, queues, limits, schedules, streams."""

from __future__ import annotations

import base64
import json
import re
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import eventually
from servers import rabbitmq_url
from servers.http import JobServer

from tidemill import Tidemill, chain
from tidemill.core.clock import new_id
from tidemill.core.retry import MESSAGE, RetryPolicy
from tidemill.testing import run_all

pytestmark = pytest.mark.everyday

ROOT = Path(__file__).parent.parent.parent
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


# -- putting --------------------------------------------------------------------------------------


def test_a_put_by_id_may_be_sent_again(server: JobServer, queue: str) -> None:
    # law 11
    path, job = "/v1/jobs/order%2F17", {"queue": queue, "body": {"n": 1}, "priority": 5}
    assert server.put(path, job).status == 201
    # the same again does nothing, and says the same
    again = server.put(path, job)
    assert (again.status, again.json) == (200, {"id": "order/17", "placed": "created"})
    # another under the same id is refused
    other = server.put(path, job | {"body": {"n": 2}})
    assert (other.status, other.json["job_id"]) == (409, "order/17")
    assert len(server.reserve(queue, count=10)) == 1


def test_a_put_by_id_may_be_sent_again_when_its_message_is_gone(
    server: JobServer, queue: str
) -> None:
    # law 11
    path, job = f"/v1/jobs/{queue}", {"queue": queue, "body": 1, "headers": {"a": "1", "b": "2"}}
    server.put(path, job)
    (taken,) = server.reserve(queue)
    assert server.post(f"/v1/reservations/{taken['receipt']}/ack").status == 204
    # the same message, in any order of its headers, is not put again
    again = server.put(path, job | {"headers": {"b": "2", "a": "1"}})
    assert (again.status, again.json) == (200, {"id": queue, "placed": "created"})
    assert server.reserve(queue) == []
    # another message may have the id
    other = job | {"body": 2}
    assert server.put(path, other).status == 201
    # and who deletes a message may put the same message again
    for method, where, how in (
        ("DELETE", path, None),
        ("POST", "/v1/jobs/delete", {"ids": [queue]}),
        ("POST", "/v1/matching/delete", {"queue": queue, "state": ["ready"]}),
        ("POST", f"/v1/queues/{queue}/purge?now=true", None),
        ("DELETE", f"/v1/queues/{queue}?force=true", None),
    ):
        assert server.request(method, where, how).status in (200, 204), where
        assert server.put(path, other).status == 201, where


def test_a_number_of_retries_keeps_the_delays_of_the_served_app(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/jobs"
    (tmp_path / "shop.py").write_text(
        "from tidemill import Retries, Tidemill\n"
        f"mill = Tidemill('{url}')\n"
        "@mill.task(retries=Retries(5, delay=60))\n"
        "def work(): ...\n"
    )
    server = JobServer("--quiet", where=f"{tmp_path}/shop.py:mill")
    try:
        once = {"task": "shop.work", "retries": 1}
        call = server.post("/v1/jobs", once).json["id"]
        server.put("/v1/schedules/s", {**once, "every": 60})
        scheduled = server.post("/v1/schedules/s/run").json["id"]
        message = server.post("/v1/jobs", {"queue": "q", "body": 1, "retries": 1}).json["id"]
        with Tidemill(url) as mill:
            for job_id in (call, scheduled):
                assert mill.job(job_id).record.envelope.retries == RetryPolicy(1, delay=60)
            policy = mill.job(message).record.envelope.retries
            assert policy == msgspec.structs.replace(MESSAGE, limit=1)
    finally:
        server.close()


def test_a_batch_is_put_whole_or_not_at_all(server: JobServer, queue: str) -> None:
    jobs = [{"queue": queue, "body": n} for n in range(3)]
    bad = server.post("/v1/jobs/batch", {"jobs": [*jobs, {"queue": queue}]})
    assert (bad.status, bad.json["detail"][:8]) == (400, "jobs[3]:")
    assert server.reserve(queue) == []
    assert server.post("/v1/jobs/batch", {"jobs": jobs}).status == 201
    assert [job["body"] for job in server.reserve(queue, count=10)] == [0, 1, 2]


def test_any_bytes_are_a_body(server: JobServer, queue: str) -> None:
    path, data = f"/v1/queues/{queue}/messages?priority=1&tags=a&tags=b", bytes(range(256))
    assert server.post(path, data, headers={"Content-Type": "image/png"}).status == 201
    assert server.post(f"/v1/queues/{queue}/messages", b'{"a": [1]}', headers=JSON).status == 201
    encoded = {"queue": queue, "body": base64.b64encode(data).decode(), "encoding": "base64"}
    assert server.post("/v1/jobs", encoded).status == 201
    first, second, third = server.reserve(queue, count=3)
    assert (base64.b64decode(first["body"]), first["encoding"]) == (data, "base64")
    assert (first["priority"], first["tags"]) == (1, ["a", "b"])
    assert (second["body"], second["encoding"]) == ({"a": [1]}, "json")
    assert base64.b64decode(third["body"]) == data


def test_a_form_is_no_body(server: JobServer, queue: str) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for path in (f"/v1/queues/{queue}/messages", "/v1/jobs"):
        answer = server.post(path, b"a=1", headers=form)
        assert answer.status == 415
        assert "--json" in answer.json["detail"]


def test_keys_merge_over_http(server: JobServer, queue: str) -> None:
    # law 12
    job = {"queue": queue, "body": 1, "key": "k"}
    first, second = server.post("/v1/jobs", job), server.post("/v1/jobs", job)
    assert (first.status, second.status) == (201, 200)
    assert second.json == {"id": first.json["id"], "placed": "kept"}


# -- taking ---------------------------------------------------------------------------------------


def test_a_message_is_taken_and_settled_once(server: JobServer, queue: str) -> None:
    server.post("/v1/jobs", {"queue": queue, "body": 1, "ttr": 30})
    (job,) = server.reserve(queue)
    assert (job["attempt"], job["ttr"]) == (1, 30)
    path = f"/v1/reservations/{job['receipt']}"
    assert server.post(f"{path}/touch", {"ttr": 60}).status == 204
    endless = server.post(f"{path}/touch", {"ttr": 1e300})
    assert (endless.status, endless.json["detail"]) == (400, "ttr: expected number <= 3153600000")
    assert server.post(f"{path}/ack").status == 204
    assert server.post(f"{path}/ack").status == 204  # the answer may have been lost
    for act in ("touch", "release", "bury"):
        late = server.post(f"{path}/{act}")
        assert (late.status, late.json["type"]) == (409, "urn:tidemill:problem:already-settled")


def test_a_buried_message_can_be_retried(server: JobServer, queue: str) -> None:
    server.post("/v1/jobs", {"queue": queue, "body": 1})
    (job,) = server.reserve(queue)
    assert server.post(f"/v1/reservations/{job['receipt']}/bury", {"reason": "odd"}).status == 204
    failed = server.get(f"/v1/jobs?state=failed&queue={queue}").json["jobs"]
    assert [(f["id"], f["error"]) for f in failed] == [(job["id"], "odd")]
    assert server.post(f"/v1/queues/{queue}/retry").json == {"count": 1}
    assert [j["id"] for j in server.reserve(queue)] == [job["id"]]


def test_a_long_poll_ends_with_a_message(server: JobServer, queue: str) -> None:
    asked = {"queues": [f"{queue}-a", f"{queue}-b"], "timeout": 60}
    poll = server.begin("POST", "/v1/reserve", asked)
    poll.send()
    server.post("/v1/jobs", {"queue": f"{queue}-b", "body": "here"})
    assert [job["body"] for job in poll.answer().json["jobs"]] == ["here"]


def test_many_are_acknowledged_at_once(server: JobServer, queue: str) -> None:
    server.post("/v1/jobs/batch", {"jobs": [{"queue": queue, "body": n} for n in range(20)]})
    receipts = [job["receipt"] for job in server.reserve(queue, count=20)]
    assert server.post("/v1/ack", {"receipts": receipts[:1]}).json == {"done": [True]}
    server.post(f"/v1/reservations/{receipts[1]}/release")
    done = server.post("/v1/ack", {"receipts": receipts}).json["done"]
    assert done == [True, False] + [True] * 18


def test_requests_behind_a_long_poll(server: JobServer, queue: str) -> None:
    asked = json.dumps({"queues": [queue], "timeout": 60}).encode()
    poll = b"POST /v1/reserve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    poll += b"Content-Length: %d\r\n\r\n%s" % (len(asked), asked)
    other = b"GET /health HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
    # given a client that left, with another request behind its poll
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        for part in (poll, other % b""):
            sock.sendall(part)
            server.get("/health")  # by then it was read
    # then it gets nothing
    server.post("/v1/jobs", {"queue": queue, "body": "first"})
    (job,) = server.reserve(queue, timeout=20)
    assert (job["body"], job["attempt"]) == ("first", 1)
    # and one that stays gets an answer to each, in order, also to what it sends meanwhile
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        last = poll[60:] + other % b"Connection: close\r\n"
        for part in (poll, other % b"", other % b"", poll[:60], last):
            sock.sendall(part)
            server.get("/health")
        for body in ("second", "third"):
            server.post("/v1/jobs", {"queue": queue, "body": body})
        with sock.makefile("rb") as answers:
            said = answers.read()
    places = [said.index(b'"second"'), said.index(b'"third"')]
    assert [said[: places[0]].count(b"200 OK"), said[: places[1]].count(b"200 OK")] == [1, 4]
    assert said.count(b"HTTP/1.1 200 OK") == 5
    assert "without starting" not in server.output


# -- looking --------------------------------------------------------------------------------------


def test_a_job_shows_its_events(server: JobServer, queue: str) -> None:
    put = server.post("/v1/jobs", {"task": "math.sqrt", "args": [2], "queue": queue}).json
    found = server.get(f"/v1/jobs/{put['id']}").json
    assert (found["task"], found["state"]) == ("math.sqrt", "ready")
    assert found["body"] == {"args": [2], "kwargs": {}}
    assert [event["what"] for event in found["trail"]] == ["created"]
    assert "no worker serves" in found["explanation"]
    result = server.get(f"/v1/jobs/{put['id']}/result?wait=0.1")
    assert (result.status, result.json["state"]) == (202, "ready")
    assert server.post(f"/v1/jobs/{put['id']}/cancel").status == 204
    assert server.post(f"/v1/jobs/{put['id']}/cancel").status == 409
    result = server.get(f"/v1/jobs/{put['id']}/result?wait=10")
    assert (result.status, result.json["state"]) == (200, "cancelled")
    assert server.delete(f"/v1/jobs/{put['id']}").status == 204
    assert server.get(f"/v1/jobs/{put['id']}").status == 410
    assert server.get("/v1/jobs/nobody").status == 404


def test_lists_continue_at_their_cursor(server: JobServer, queue: str) -> None:
    server.post("/v1/jobs/batch", {"jobs": [{"queue": queue, "body": n} for n in range(5)]})
    seen, cursor = [], ""
    while True:
        page = server.get(f"/v1/jobs?queue={queue}&limit=2&cursor={cursor}").json
        seen += [job["summary"] for job in page["jobs"]]
        cursor = page["cursor"]
        if not cursor:
            break
    assert seen == ["4", "3", "2", "1", "0"]


def test_many_jobs_are_changed_at_once(server: JobServer, queue: str) -> None:
    ids = [server.post("/v1/jobs", {"queue": queue, "body": n}).json["id"] for n in range(3)]
    acts = [("cancel", [True] * 3), ("cancel", [False] * 3), ("retry", [True] * 3)]
    for act, done in [*acts, ("delete", [True] * 3), ("delete", [False] * 3)]:
        assert server.post(f"/v1/jobs/{act}", {"ids": ids}).json == {"done": done}


def test_a_refused_retry_gives_the_reason(server: JobServer, queue: str) -> None:
    made = server.post("/v1/jobs", {"queue": queue, "body": 1}).json["id"]
    refused = server.post(f"/v1/jobs/{made}/retry")
    assert refused.status == 409
    assert "it is ready" in refused.json["detail"]
    assert server.post(f"/v1/jobs/{made}/retry?force=true").status == 409
    assert server.post("/v1/jobs/retry", {"ids": [made], "force": True}).json == {"done": [False]}


def test_a_retry_of_a_chain_is_of_the_whole(server: JobServer) -> None:
    # case M2
    with Tidemill(server.url) as mill:

        @mill.task(retries=0, queue="whole", name="whole")
        def fail(before: object = None) -> None:
            raise ValueError("no")

        handle = mill.enqueue(chain(fail.call(), fail, fail))
        run_all(mill, queues=["whole"])
        first, middle, last = handle.steps
        # when a step is retried that cannot run
        refused = server.post(f"/v1/jobs/{middle.id}/retry")
        # then the failed job is named
        assert refused.status == 409
        assert f"job {first.id}, which failed: " in refused.json["detail"]
        # and the chain begins with the failed job
        for path, body in (
            (f"/v1/jobs/{last.id}/retry", {}),
            ("/v1/jobs/retry", {"ids": [last.id]}),
            ("/v1/matching/retry", {"queue": "whole", "state": ["failed", "cancelled"]}),
        ):
            assert server.post(path, body).status in (200, 204)
            assert [step.state for step in handle.steps] == ["ready", "waiting", "waiting"]
            run_all(mill, queues=["whole"])


def test_a_waiting_job_gets_another_priority_and_queue(server: JobServer, queue: str) -> None:
    one, two, three = (
        server.post("/v1/jobs", {"queue": queue, "body": n}).json["id"] for n in range(3)
    )
    target = f"{queue}-other"
    # when
    assert server.post(f"/v1/jobs/{one}/alter", {"to_queue": target}).status == 204
    both = {"to_priority": 5, "to_queue": target}
    assert server.post("/v1/jobs/alter", {"ids": [two, "none"], **both}).json == {
        "done": [True, False]
    }
    matching = {"state": ["ready"], "queue": target, "to_priority": 7}
    assert server.post("/v1/matching/alter", matching).json == {
        "ids": [two, one],
        "done": [True, True],
        "more": False,
    }
    # then
    shown = [server.get(f"/v1/jobs/{i}").json for i in (one, two, three)]
    assert [(it["queue"], it["priority"]) for it in shown] == [(target, 7), (target, 7), (queue, 0)]
    lines = [event["detail"] for event in shown[1]["trail"] if event["what"] == "log"]
    assert lines == [f"altered: queue {target}, priority 5", "altered: priority 7"]
    assert server.post(f"/v1/jobs/{one}/alter", {}).status == 400
    # and a job that has ended or runs is refused with the reason
    server.post(f"/v1/jobs/{three}/cancel")
    refused = server.post(f"/v1/jobs/{three}/alter", {"to_priority": 1})
    assert refused.status == 409
    assert "it was cancelled already" in refused.json["detail"]
    assert server.reserve(target)[0]["id"] == one
    refused = server.post(f"/v1/jobs/{one}/alter", {"to_priority": 1})
    assert "it runs; only a job that waits" in refused.json["detail"]


def test_queues_are_paused_bounded_and_purged(server: JobServer, queue: str) -> None:
    assert server.get(f"/v1/queues/{queue}").status == 404
    assert server.request("PATCH", f"/v1/queues/{queue}", {"max_size": 2}).json["max_size"] == 2
    statuses = [server.post("/v1/jobs", {"queue": queue, "body": n}).status for n in range(3)]
    assert statuses == [201, 201, 429]
    assert server.post(f"/v1/queues/{queue}/pause").json["paused"] is True
    assert server.reserve(queue) == []
    assert server.post(f"/v1/queues/{queue}/resume").json["paused"] is False
    assert server.post(f"/v1/queues/{queue}/purge").json == {"count": 2}
    assert server.get(f"/v1/queues/{queue}").json["size"] == 0


def test_a_purge_is_listed_and_restored(server: JobServer, queue: str) -> None:
    path = f"/v1/queues/{queue}"
    assert server.post(f"{path}/restore", {}).status == 404
    made = [server.post("/v1/jobs", {"queue": queue, "body": n}).json["id"] for n in range(2)]
    assert server.post(f"{path}/purge").json == {"count": 2}
    assert server.get(f"/v1/jobs/{made[0]}").json["state"] == "cancelled"
    (purge,) = server.get(f"{path}/purges").json["purges"]
    assert purge["jobs"] == 2

    assert server.post(f"{path}/restore", {"purge": "unknown"}).status == 404
    assert server.post(f"{path}/restore", {"purge": purge["id"]}).json == {"count": 2, "left": 0}

    assert server.get(path).json["ready"] == 2
    assert server.get(f"{path}/purges").json == {"purges": []}
    server.post(f"{path}/purge")
    assert server.post(f"{path}/restore", {}).json == {"count": 2, "left": 0}


def test_a_queue_is_deleted_with_its_counters(server: JobServer, queue: str) -> None:
    path = f"/v1/queues/{queue}"
    server.post("/v1/jobs", {"queue": queue, "body": 1})
    refused = server.delete(path)
    assert refused.status == 409
    assert "1 unfinished job; purge it first" in refused.json["detail"]
    assert server.post(f"{path}/purge?now=true").json == {"count": 1}
    assert server.get(path).json["purged"] == 1

    assert server.delete(path).json == {"count": 0}

    assert server.get(path).status == 404
    server.post("/v1/jobs", {"queue": queue, "body": 2})
    assert server.get(path).json["accepted"] == 1
    assert server.delete(f"{path}?force=true").json == {"count": 1}
    assert server.delete(path).status == 404


def test_limits_are_set_and_lifted(server: JobServer, queue: str) -> None:
    path = f"/v1/queues/{queue}/limit"
    breaker = {"failures": 3, "pause": 30}
    said = {"rate": "10/m", "burst": 1, "breaker": {"failures": 3}}
    made = server.request("PATCH", path, said).json
    assert (made["rate"], made["burst"], made["breaker"]) == ("10/m", 1, breaker)
    server.post("/v1/jobs/batch", {"jobs": [{"queue": queue, "body": n} for n in range(3)]})
    assert len(server.reserve(queue, count=3)) == 1
    lifted = server.request("PATCH", path, {"rate": None}).json
    assert (lifted["rate"], lifted["breaker"]) == (None, breaker)
    assert len(server.reserve(queue, count=3)) == 2
    # what comes out goes in again
    assert server.request("PATCH", path, {"breaker": breaker}).json["breaker"] == breaker
    assert server.delete(path).json["breaker"] is None
    nobody = server.request("PATCH", "/v1/limits/nobody", {"rate": "1/s"})
    assert (nobody.status, nobody.json["detail"].partition(";")[0]) == (
        404,
        "there is no limit 'nobody'",
    )


def test_schedules(server: JobServer, queue: str) -> None:
    path = f"/v1/schedules/{queue}"
    job = {"task": "math.sqrt", "args": [2], "queue": queue}
    made = server.put(path, job | {"cron": "0 3 1 1 *", "zone": "Europe/Berlin"})
    assert (made.status, made.json["when"]) == (201, "0 3 1 1 * Europe/Berlin")
    # the same again does nothing, another is refused
    assert server.post(f"{path}/pause").json["paused"] is True
    again = server.put(path, job | {"cron": "0 3 1 1 *", "zone": "Europe/Berlin"})
    assert (again.status, again.json) == (200, made.json | {"next": None, "paused": True})
    assert server.put(path, job | {"every": 60}).status == 409
    assert server.put(path, job | {"cron": "0 3 1 1 *"}).status == 409
    other = job | {"args": [3], "cron": "0 3 1 1 *", "zone": "Europe/Berlin"}
    assert server.put(path, other).status == 409
    assert server.put(f"{path}-2", job | {"cron": "0 3 * *"}).status == 400
    for name, value in [("every", 0), ("at", 0)]:  # given, though as nothing
        refused = server.put(f"{path}-2", job | {name: value})
        assert (refused.status, refused.json["detail"].split()[0]) == (400, name)
    assert server.post(f"{path}/run").json["placed"] == "created"
    assert server.post(f"{path}/resume").json["next"] == made.json["next"]
    assert [s["name"] for s in server.get("/v1/schedules").json["schedules"]] == [queue]
    assert server.delete(path).status == 204
    assert server.get(path).status == 404


def test_a_schedule_that_is_run_while_its_key_is_held_makes_nothing(
    server: JobServer, queue: str
) -> None:
    job = {"task": "math.sqrt", "args": [2], "queue": queue, "key": queue, "every": 3600}
    assert server.put(f"/v1/schedules/{queue}", job).status == 201
    first, second = (server.post(f"/v1/schedules/{queue}/run") for _ in range(2))
    assert (first.status, first.json["placed"]) == (201, "created")
    assert (second.status, second.json) == (200, {"id": first.json["id"], "placed": "kept"})


def test_statistics_of_the_store_and_the_server(server: JobServer, queue: str) -> None:
    server.post("/v1/jobs", {"queue": queue, "body": 1})
    stats = server.get("/v1/stats").json
    assert stats["totals"]["accepted"] >= 1
    assert queue in [row["name"] for row in stats["queues"]]
    (worker,) = server.get("/v1/workers").json["workers"]
    assert (worker["kind"], worker["pid"]) == ("consumer", server.pid)


def test_the_health_of_a_store_has_the_findings_of_the_doctor(
    server: JobServer, queue: str
) -> None:  # case M17
    server.post("/v1/jobs", {"queue": queue, "body": 1})
    assert server.post(f"/v1/queues/{queue}/pause").status == 200
    health = server.get("/v1/health").json
    assert health["ok"] is True
    (found,) = [one for one in health["findings"] if one["queue"] == queue]
    assert (found["status"], found["note"]) == ("warn", "paused")
    assert found["message"] == f"queue {queue} is paused with 1 ready job"
    assert found["advice"] == f"tidemill resume {queue}"
    server.post(f"/v1/queues/{queue}/resume")


def test_numbers_that_the_broker_does_not_know_are_null() -> None:
    """RabbitMQ without a store tells what is ready, and little else."""
    server = JobServer("--quiet", where=f"{rabbitmq_url()}?prefix=t{new_id()[-12:]}")
    try:
        for ready in (0, 1):  # of no queue, and of one
            stats = server.get("/v1/stats").json
            known = {name: n for name, n in stats["totals"].items() if n is not None}
            assert known == {"ready": ready, "waiting": 0}
            assert len(stats["totals"]) == 11
            server.post("/v1/jobs", {"queue": "a", "body": 1})
        assert stats["workers"] is None
        assert server.get("/v1/workers").json == {"workers": None}
    finally:
        server.close()


# -- streams --------------------------------------------------------------------------------------


def test_a_stream_reports_queues_whenever_they_change(server: JobServer, queue: str) -> None:
    with server.stream("/v1/events") as events:
        assert next(events)[0] == "queues"
        server.post("/v1/jobs", {"queue": queue, "body": 1})
        for name, data in events:
            assert name == "queues"
            rows = {row["name"]: row for row in data["queues"]}
            if queue in rows and rows[queue]["ready"] == 1:
                break


def test_a_stream_reports_a_job_until_its_end(server: JobServer, queue: str) -> None:
    put = server.post("/v1/jobs", {"task": "math.sqrt", "args": [2], "queue": queue}).json
    with server.stream(f"/v1/jobs/{put['id']}/events") as events:
        name, data = next(events)
        assert (name, data["state"]) == ("job", "ready")
        server.post(f"/v1/jobs/{put['id']}/cancel")
        *_, (name, data) = events
        assert (name, data["state"]) == ("end", "cancelled")


def declare(url: str, *names: str, **options: Any) -> None:
    """Declare tasks on the server's store, as their worker does at its start."""
    with Tidemill(url) as mill:
        for name in names:
            mill.task(name=name, **options)(max)
        run_all(mill, queues=["none"])


def test_a_call_of_a_declared_task_has_the_workers_options(server: JobServer, queue: str) -> None:
    # given a server on a URL, and a worker that has declared its task
    task = f"{queue}.send"
    call = {"task": task, "args": [1, 2]}
    refused = server.post("/v1/jobs", call)
    assert refused.status == 404
    assert "has declared it; start its worker first" in refused.json["detail"]
    declare(server.where, task, queue=queue, retries=9, priority=5)
    wrong, said = call | {"task": f"{queue}.sned"}, f"did you mean '{task}'? Else start its worker"
    eventually(lambda: said in server.post("/v1/jobs", wrong).json["detail"], "the suggestion")
    # when clients call it by its name, in every way
    put = [
        eventually(lambda: server.post("/v1/jobs", call).json.get("id"), "the declaration"),
        *(one["id"] for one in server.post("/v1/jobs/batch", {"jobs": [call]}).json["jobs"]),
        server.put(f"/v1/jobs/{queue}", call).json["id"],
    ]
    server.put(f"/v1/schedules/{queue}", call | {"every": 3600})
    put.append(server.post(f"/v1/schedules/{queue}/run").json["id"])
    # then its options hold
    for job_id in put:
        job = server.get(f"/v1/jobs/{job_id}").json
        assert (job["queue"], job["priority"], job["max_attempts"]) == (queue, 5, 10)


def test_the_changes_that_the_document_shows_are_accepted(server: JobServer) -> None:
    declare(server.where, "shop.report", "shop.sweep")
    server.post("/v1/jobs", {"task": "shop.thumbnail", "queue": "thumbs", "limit": "1/s"})
    text = (ROOT / "docs" / "server.md").read_text()
    shown = re.findall(r"^curl -X (PATCH|PUT) --json '(.*)' \$B(/\S+)$", text, re.MULTILINE)
    assert {path.split("/")[2] for _, _, path in shown} == {"queues", "limits", "schedules"}
    for method, body, path in shown:
        answer = server.request(method, path, json.loads(body))
        assert answer.status in (200, 201), (path, answer.json)
