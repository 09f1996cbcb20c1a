"""Tasks that workers in other languages run over HTTP: reserve, heartbeat, complete, fail."""

from __future__ import annotations

import base64
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import eventually
from once_storm import STORES
from servers.http import Answer, JobServer

from tidemill import Flow, Tidemill, chain

KEEPING = [name for name in STORES if name != "rabbitmq"]


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)[:100]


def producer(server: JobServer) -> Tidemill:
    """An app that calls tasks which no Python code has."""
    return Tidemill(server.where, allow_imports=["js.*"])


def call(server: JobServer, queue: str, task: str = "js.work", **more: Any) -> str:
    body = {"task": task, "queue": queue, **more}
    return str(server.post("/v1/jobs", body).json["id"])


def take(server: JobServer, queue: str, *tasks: str, timeout: float = 10) -> dict[str, Any]:
    (job,) = reserve(server, queue, *tasks, timeout=timeout)
    return job


def reserve(
    server: JobServer, queue: str, *tasks: str, timeout: float = 0, count: int = 1
) -> list[dict[str, Any]]:
    wish = {"tasks": tasks or ["js.work"], "queues": [queue], "timeout": timeout, "count": count}
    answer = server.post("/v1/tasks/reserve", wish)
    assert answer.status == 200, answer.data
    return list(answer.json["jobs"])


def say(server: JobServer, job: dict[str, Any], what: str, **body: Any) -> Answer:
    return server.post(f"/v1/reservations/{job['receipt']}/{what}", body)


def kind(answer: Answer) -> str:
    return str(answer.json["type"]).rpartition(":")[2]


@pytest.mark.parametrize("store", KEEPING)
def test_a_task_is_reserved_by_its_name_and_its_caller_gets_the_result(
    store: str, tmp_path: Path
) -> None:
    # laws 4, 5 and 7
    server = JobServer("--quiet", where=STORES[store](tmp_path))
    try:
        # given a Python producer, and a worker elsewhere that waits
        with producer(server) as mill:
            found: list[dict[str, Any]] = []
            waiting = threading.Thread(target=lambda: found.append(take(server, "q")))
            waiting.start()
            time.sleep(0.2)
            asked = mill.enqueue(mill.call("js.work", 1, b=[2]).using(queue="q", retries=1))
            waiting.join()
            (job,) = found
            assert (job["task"], job["args"], job["kwargs"]) == ("js.work", [1], {"b": [2]})
            assert (job["id"], job["attempt"], job["ttr"]) == (asked.id, 1, 60.0)
            # when it says how far it is
            answer = say(server, job, "heartbeat", ttr=90, progress=1, total=4, log=["begun"])
            assert (answer.status, answer.json) == (200, {"stop": None})
            record = asked.refresh()
            assert (record.state, record.progress) == ("running", (1.0, 4.0))
            assert [line for _, line in record.log] == ["begun"]
            # and is done
            assert say(server, job, "complete", result={"sum": 3}).status == 204
            # then
            assert asked.result(10) == {"sum": 3}
            # and the same again does nothing, another act is refused
            assert say(server, job, "complete", result={"sum": 3}).status == 204
            assert kind(say(server, job, "fail", error="x")) == "already-settled"
            assert kind(say(server, job, "heartbeat")) == "already-settled"
    finally:
        server.close()


def test_many_tasks_are_completed_in_one_request(server: JobServer, queue: str) -> None:
    # given two tasks, a message and a task of another worker
    ids = [call(server, queue) for _ in range(2)]
    jobs = reserve(server, queue, count=2, timeout=10)
    server.post(f"/v1/queues/{queue}m/messages", "hello")
    (message,) = server.post("/v1/reserve", {"queues": [f"{queue}m"]}).json["jobs"]
    done = [{"receipt": job["receipt"], "result": job["id"]} for job in jobs]
    # when one result cannot be decoded, then nothing is completed
    wrong = {"receipt": jobs[0]["receipt"], "result": "ü", "encoding": "base64"}
    assert server.post("/v1/complete", {"results": [done[1], wrong]}).status == 400
    assert server.get(f"/v1/jobs/{ids[0]}").json["state"] == "running"
    # when all results are good, then each task has its own
    more = [{"receipt": "nix"}, {"receipt": message["receipt"]}]
    answer = server.post("/v1/complete", {"results": [*done, *more]})
    assert answer.json == {"done": [True, True, False, False]}
    assert [server.get(f"/v1/jobs/{id}/result").json["result"] for id in ids] == ids
    # and the request can be repeated
    assert server.post("/v1/complete", {"results": done}).json == {"done": [True, True]}


@pytest.mark.parametrize("store", KEEPING)
def test_a_worker_that_is_silent_for_its_ttr_loses_the_task(store: str, tmp_path: Path) -> None:
    # law 5: no job is lost with its worker
    server = JobServer("--quiet", where=STORES[store](tmp_path))
    try:
        job_id = call(server, "q")
        lost = take(server, "q")
        assert say(server, lost, "heartbeat", ttr=0.5).status == 200
        # when another waits for it
        again = take(server, "q", timeout=20)
        # then it is a new attempt, and the first worker is told that it lost the job
        assert (again["id"], again["attempt"]) == (job_id, 2)
        for act, body in [("heartbeat", {}), ("complete", {}), ("fail", {"error": "x"})]:
            assert kind(say(server, lost, act, **body)) == "lease-lost"
        assert say(server, again, "complete").status == 204
        attempts = server.get(f"/v1/jobs/{job_id}").json["attempts"]
        assert [(a["outcome"], a["error"]) for a in attempts] == [
            ("retry", "ttr passed without an ack"),
            ("success", None),
        ]
    finally:
        server.close()


def test_a_failure_backs_off_as_the_task_says(server: JobServer, queue: str) -> None:
    # given a task with one retry
    job_id = call(server, queue, retries=1)
    job = take(server, queue)
    assert say(server, job, "fail", error="E: once", traceback="at line 7").status == 204
    # then it waits for its backoff
    found = server.get(f"/v1/jobs/{job_id}").json
    assert (found["state"], found["attempt"]) == ("scheduled", 1)
    assert found["attempts"][0]["traceback"] == "at line 7"
    # when it is made ready, and fails again
    assert server.post(f"/v1/jobs/{job_id}/retry").status == 204
    job = take(server, queue)
    assert (job["attempt"], job["max_attempts"]) == (2, 2)
    assert say(server, job, "fail", error="E: twice").status == 204
    assert server.get(f"/v1/jobs/{job_id}").json["state"] == "failed"


def test_a_failure_may_name_its_delay_or_be_the_last(server: JobServer, queue: str) -> None:
    soon, never = call(server, queue), call(server, queue)
    first, second = reserve(server, queue, count=2)
    assert say(server, first, "fail", error="E", delay=0).status == 204
    assert say(server, second, "fail", error="E", retry=False).status == 204
    assert take(server, queue)["id"] == soon
    assert server.get(f"/v1/jobs/{never}").json["state"] == "failed"


def test_a_release_counts_nothing_and_with_an_error_it_backs_off(
    server: JobServer, queue: str
) -> None:
    job_id = call(server, queue)
    assert say(server, take(server, queue), "release").status == 204
    job = take(server, queue)
    assert job["attempt"] == 1
    assert say(server, job, "release", error="E").status == 204
    found = server.get(f"/v1/jobs/{job_id}").json
    assert (found["state"], found["attempt"]) == ("scheduled", 1)


def test_tasks_of_other_names_wait_for_a_worker_that_knows_them(
    server: JobServer, queue: str
) -> None:
    # law 7
    others = [call(server, queue, "py.work") for _ in range(2)]
    mine = call(server, queue)
    # when a worker that knows one name asks, it gets none of the others
    assert take(server, queue)["id"] == mine
    found = server.get(f"/v1/jobs/{others[0]}").json
    assert (found["state"], found["attempt"]) == ("scheduled", 0)
    assert found["error"] == "no worker knows task 'py.work'"
    # and a worker that waits for the other name gets those when they are tried again
    found = [take(server, queue, "py.work", timeout=30)["id"] for _ in others]
    assert sorted(found) == sorted(others)
    # and one that is asleep gets a job that another has given back
    taken: list[str] = []
    asleep = threading.Thread(
        target=lambda: taken.append(take(server, queue, "py.work", timeout=30)["id"])
    )
    asleep.start()
    time.sleep(0.3)
    late = call(server, queue, "py.work")
    reserve(server, queue, timeout=0.5)
    asleep.join()
    assert taken == [late]


def test_messages_and_tasks_of_one_queue_go_their_own_ways(server: JobServer, queue: str) -> None:
    server.post("/v1/jobs", {"queue": queue, "id": f"{queue}-m", "body": 1})
    task = call(server, queue)
    assert [it["id"] for it in reserve(server, queue, count=5)] == [task]
    (message,) = server.reserve(queue, count=5)
    assert message["id"] == f"{queue}-m"
    answer = say(server, message, "complete", result=1)
    assert (answer.status, kind(answer)) == (400, "invalid-request")
    assert say(server, message, "ack").status == 204


def test_a_heartbeat_reports_a_cancelled_job(server: JobServer, queue: str) -> None:
    job_id = call(server, queue)
    job = take(server, queue)
    assert server.post(f"/v1/jobs/{job_id}/cancel").status == 204
    assert say(server, job, "heartbeat").json == {"stop": "cancelled"}
    assert say(server, job, "stopped", reason="rolled back").status == 204
    found = server.get(f"/v1/jobs/{job_id}").json
    assert (found["state"], found["error"]) == ("cancelled", "rolled back")


def test_a_job_beyond_its_timeout_gets_no_more_time(server: JobServer, queue: str) -> None:
    call(server, queue, timeout=0.2)
    job = take(server, queue)
    assert job["timeout"] == 0.2
    assert say(server, job, "touch", ttr=8).status == 204
    time.sleep(0.3)
    assert say(server, job, "heartbeat", ttr=60).json == {"stop": "timeout"}
    again = take(server, queue, timeout=25)
    assert again["attempt"] == 2
    assert say(server, again, "complete").status == 204


def test_results_of_other_jobs_are_filled_in(server: JobServer, queue: str) -> None:
    with producer(server) as mill:
        first = mill.call("js.first").using(queue=queue)
        second = mill.call("js.second", 5).using(queue=queue)
        chained = mill.enqueue(chain(first, second))
        job = take(server, queue, "js.first", "js.second")
        assert say(server, job, "complete", result={"n": 4}).status == 204
        job = take(server, queue, "js.first", "js.second")
        assert (job["task"], job["args"]) == ("js.second", [{"n": 4}, 5])
        assert say(server, job, "complete", result="last").status == 204
        assert chained.result(10) == "last"


def test_a_call_waits_for_the_end_of_a_job_that_was_retried(server: JobServer, queue: str) -> None:
    # case M3
    with producer(server) as mill:
        flow = Flow()
        first = flow.add(mill.call("js.first").using(queue=queue))
        flow.add(mill.call("js.second", first).using(queue=queue), waits="any")
        both = mill.enqueue(flow)
        job = take(server, queue, "js.first")
        assert say(server, job, "fail", error="no", retry=False).status == 204
        assert both.retry() == 1
        assert reserve(server, queue, "js.second", timeout=0.5) == []
        job = take(server, queue, "js.first")
        assert say(server, job, "complete", result=4).status == 204
        assert take(server, queue, "js.second", timeout=25)["args"] == [4]


def test_a_result_may_be_bytes(server: JobServer, queue: str) -> None:
    job_id = call(server, queue)
    data = base64.b64encode(b"\x00\xff").decode()
    job = take(server, queue)
    assert say(server, job, "complete", result=data, encoding="base64").status == 204
    end = server.get(f"/v1/jobs/{job_id}/result").json
    assert (end["result"], end["encoding"]) == (data, "base64")


def test_arguments_that_do_not_fit_into_json_fail_the_job(server: JobServer, queue: str) -> None:
    with producer(server) as mill:
        asked = mill.enqueue(mill.call("js.work", {(1, 2): 3}).using(queue=queue))
        assert reserve(server, queue, timeout=1) == []
        eventually(lambda: asked.refresh().state == "failed", "the end of the job")
        assert "cannot be written as JSON" in asked.refresh().error


def test_names_that_no_task_can_have_are_refused(server: JobServer) -> None:
    for name, why in [("ä" * 150, "task has 300 bytes"), ("a\0b", "task 'a\\x00b' contains")]:
        answer = server.post("/v1/tasks/reserve", {"tasks": [name]})
        assert answer.status == 400
        assert answer.json["detail"].startswith(why)


def test_a_client_that_leaves_holds_no_task(server: JobServer, queue: str) -> None:
    body = f'{{"tasks": ["js.work"], "queues": ["{queue}"], "timeout": 30}}'
    head = f"POST /v1/tasks/reserve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        time.sleep(0.2)
    job_id = call(server, queue)
    assert take(server, queue)["id"] == job_id


def test_many_receipts_are_settled_in_one_request(server: JobServer, queue: str) -> None:
    for n in range(4):
        server.post("/v1/jobs", {"queue": queue, "id": f"{queue}{n}", "body": n})

    def take_all(count: int) -> list[str]:
        wish = {"queues": [queue], "count": count, "timeout": 10}
        return [it["receipt"] for it in server.post("/v1/reserve", wish).json["jobs"]]

    def act(what: str, receipts: list[str], **more: Any) -> list[bool]:
        answer = server.post(f"/v1/{what}", {"receipts": receipts, **more})
        assert answer.status == 200, answer.data
        return list(answer.json["done"])

    receipts = take_all(4)
    assert act("touch", [*receipts, "none"], ttr=90) == [True] * 4 + [False]
    assert act("release", receipts[:2]) == [True, True]
    assert act("touch", receipts[:1]) == [False]
    assert act("bury", receipts[2:], reason="no such user") == [True, True]
    again = take_all(2)
    assert act("release", again, error="once") == [True, True]
    found = server.get(f"/v1/jobs?queue={queue}").json["jobs"]
    assert sorted((it["state"], it["attempt"], it["error"]) for it in found) == [
        ("failed", 1, "no such user"),
        ("failed", 1, "no such user"),
        ("ready", 1, "once"),
        ("ready", 1, "once"),
    ]


def test_jobs_that_match_are_retried_cancelled_and_deleted(server: JobServer, queue: str) -> None:
    ids = [call(server, queue, tags=["a" if n % 2 else "b"]) for n in range(6)]

    def act(what: str, **body: Any) -> tuple[list[str], list[bool], bool]:
        answer = server.post(f"/v1/matching/{what}", {"queue": queue, **body})
        assert answer.status == 200, answer.data
        it = answer.json
        return it["ids"], it["done"], it["more"]

    assert act("cancel", state=["ready"], tag="a") == ([ids[5], ids[3], ids[1]], [True] * 3, False)
    assert act("retry", state=["cancelled"], limit=2)[:2] == ([ids[5], ids[3]], [True] * 2)
    found, done, more = act("delete", state=["ready", "cancelled"], limit=4)
    assert (found, done, more) == ([ids[5], ids[4], ids[3], ids[2]], [True] * 4, True)
    assert act("delete", state=["ready", "cancelled"])[0] == [ids[1], ids[0]]
    refused = server.post("/v1/matching/delete", {"queue": queue})
    assert (refused.status, refused.json["detail"]) == (400, "object missing required field state")


def test_a_list_has_bodies_on_request_within_bounds(server: JobServer, queue: str) -> None:
    server.post("/v1/jobs", {"queue": queue, "body": {"order": 1}})
    call(server, queue, args=[1], kwargs={"b": 2})
    rows = server.get(f"/v1/jobs?queue={queue}&bodies=true").json["jobs"]
    assert [row["body"] for row in rows] == [{"args": [1], "kwargs": {"b": 2}}, {"order": 1}]
    assert "body" not in server.get(f"/v1/jobs?queue={queue}").json["jobs"][0]
    # and a list with bodies has 16 jobs at most, and goes on
    server.post("/v1/jobs/batch", {"jobs": [{"queue": queue, "body": n} for n in range(20)]})
    sizes, cursor = list[int](), ""
    while cursor is not None:
        answer = server.get(f"/v1/jobs?queue={queue}&bodies=1&limit=1000&cursor={cursor}").json
        sizes, cursor = [*sizes, len(answer["jobs"])], answer["cursor"]
    assert (max(sizes), sum(sizes)) == (16, 22)


def test_ready_reports_refused_puts(tmp_path: Path) -> None:
    # given a store whose map is full
    server = JobServer("--quiet", where=f"lmdb://{tmp_path}/store?map_size={1 << 21}")
    try:
        assert server.get("/ready").json == {"status": "ready"}
        job = {"queue": "q", "body": "x" * 20_000}
        while (answer := server.post("/v1/jobs", job)).status != 507:
            assert answer.status == 201
        # then it says so, and work goes on
        answer = server.get("/ready")
        assert (answer.status, answer.json["status"]) == (200, "ready")
        assert "larger map_size" in answer.json["puts_refused"]
        for message in server.reserve("q", count=100):
            assert say(server, message, "ack").status == 204
        eventually(lambda: server.post("/v1/jobs", job).status == 201, "room for puts")
        assert server.get("/ready").json == {"status": "ready"}
    finally:
        server.close()
