"""Bounds of a job server's memory over all its connections: bodies, answers, lists, streams."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from harness import eventually
from servers.http import JobServer

from tidemill import Filter, Tidemill, chain, group
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.rpc import CALLS, MEDIA, PATH, PROTOCOL, VERSION
from tidemill.core.job import Outcome, Owner, Verdict
from tidemill.testing import run_all

MB = 1 << 20
Start = Callable[..., JobServer]


def connect(server: JobServer, request: bytes, buffer: int = 0) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(30)
    if buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(request)
    return sock


def memory(server: JobServer) -> int:
    """The memory of a server in bytes, without the mapped file of its store."""
    assert server.pid
    info = psutil.Process(server.pid).memory_info()
    return int(info.rss - info.shared)


def fill(server: JobServer, queue: str, count: int, **more: Any) -> None:
    """Put messages, some megabytes at a time."""
    for first in range(0, count, 10):
        jobs = [{"queue": queue, **more} for _ in range(first, min(first + 10, count))]
        assert server.post("/v1/jobs/batch", {"jobs": jobs}).status == 201


def test_bodies_in_memory_share_a_bound(start: Start) -> None:
    # given a server that may use 32 MiB
    server = start("--quiet", "--max-memory", str(32 * MB))
    assert server.get("/health").status == 200
    least = memory(server)
    # when 30 clients send 4 MiB each of a larger body, and then wait
    head = (
        b"POST /v1/jobs/batch HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (15 * MB)
    )
    socks = [connect(server, head) for _ in range(30)]
    for sock in socks:
        with contextlib.suppress(ConnectionError):  # it may be refused before it has sent all
            sock.sendall(b" " * (4 * MB))
        sock.setblocking(False)
    # then those beyond the bound are refused, and others are served
    said: dict[socket.socket, bytes] = {}

    def refused() -> int:
        for sock in socks:
            with contextlib.suppress(BlockingIOError):
                try:
                    said[sock] = said.get(sock, b"") + sock.recv(4096)
                except ConnectionError:
                    said.setdefault(sock, b"")
        return len(said)

    eventually(lambda: refused() >= 22)
    answers = [answer for answer in said.values() if answer]
    assert answers
    assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
    assert any(b"retry-after: 1\r\n" in answer for answer in answers)
    assert any(b"urn:tidemill:problem:busy" in answer for answer in answers)
    assert memory(server) - least < 80 * MB
    assert server.post("/v1/jobs", {"queue": "a", "body": 1}).status == 201
    # and once they have gone, there is room again
    for sock in socks:
        sock.close()
    jobs = [{"queue": "a", "body": "x" * (MB - 100)} for _ in range(10)]

    def has_room() -> bool:
        with contextlib.suppress(ConnectionError):  # it was refused before it had sent all
            return server.post("/v1/jobs/batch", {"jobs": jobs}).status == 201
        return False

    eventually(has_room)


def test_a_reservation_of_many_large_messages_has_a_bound(start: Start) -> None:
    # given 40 messages of 900 kB
    server = start("--quiet")
    for n in range(40):
        assert server.post("/v1/jobs", {"queue": "a", "body": f"{n}" + "x" * 900_000}).status == 201
    # when 1,000 are asked for, again and again
    got: list[str] = []
    while len(got) < 40:
        answer = server.post("/v1/reserve", {"queues": ["a"], "count": 1000})
        # then each answer has some, and all come once, in order
        assert 0 < len(answer.data) < 10 * MB
        got += [job["body"][:-900_000] for job in answer.json["jobs"]]
        assert answer.json["jobs"]
    assert got == [str(n) for n in range(40)]


def test_a_reservation_of_many_large_tasks_has_a_bound(start: Start) -> None:
    # given 15 calls with 900 kB of arguments
    server = start("--quiet")
    fill(server, "a", 15, task="js.work", args=["x" * 900_000])
    # when 1,000 are asked for, again and again
    wish = {"tasks": ["js.work"], "queues": ["a"], "count": 1000}
    counts: list[int] = []
    while sum(counts) < 15:
        answer = server.post("/v1/tasks/reserve", wish)
        # then each answer has some, within the bound
        assert len(answer.data) < 10 * MB
        counts.append(len(answer.json["jobs"]))
        assert counts[-1]
    assert server.post("/v1/tasks/reserve", wish).json == {"jobs": []}


def test_results_that_are_filled_into_tasks_have_a_bound(start: Start) -> None:
    # given two calls that each take the results of a group, which have 9 MB
    server = start("--quiet")
    with Tidemill(server.where, allow_imports=["js.*"]) as mill:
        for _ in range(2):
            part = mill.call("js.part").using(queue="a")
            mill.enqueue(chain(group([part]), mill.call("js.all").using(queue="a")))
    wish = {"tasks": ["js.part", "js.all"], "queues": ["a"], "count": 10, "timeout": 10}
    parts = server.post("/v1/tasks/reserve", wish).json["jobs"]
    assert [job["task"] for job in parts] == ["js.part"] * 2
    for job in parts:
        result = {"result": "x" * 9_000_000}
        path = f"/v1/reservations/{job['receipt']}/complete"
        assert server.post(path, result).status == 204
    # when both are reserved, then each comes in its own answer, with no attempt counted before
    for _ in range(2):
        answer = server.post("/v1/tasks/reserve", wish)
        assert len(answer.data) < 10 * MB
        (job,) = answer.json["jobs"]
        assert (job["task"], job["attempt"]) == ("js.all", 1)


def test_a_list_with_bodies_has_a_bound(start: Start) -> None:
    # given 12 jobs of 900 kB
    server = start("--quiet")
    fill(server, "a", 12, body="x" * 900_000)
    # when they are listed with their bodies, then all come once, in answers within the bound
    sizes: list[int] = []
    cursor = ""
    while cursor is not None:
        answer = server.get(f"/v1/jobs?bodies=true&cursor={cursor}")
        assert len(answer.data) < 10 * MB
        sizes.append(len(answer.json["jobs"]))
        cursor = answer.json["cursor"]
    assert sum(sizes) == 12
    assert len(sizes) < 4


@pytest.mark.everyday
def test_a_list_is_cut_by_what_it_shows(start: Start) -> None:  # case M10
    # given 30 jobs whose arguments and results have a megabyte each
    server = start("--quiet")
    pages = "/jobs", "/jobs.json?q=", "/flows"
    for look in pages:
        assert server.get(look).status == 200
    fill(server, "a", 30, task="js.part", args=["x" * 1_000_000])
    wish = {"tasks": ["js.part"], "queues": ["a"], "count": 1, "timeout": 10}
    for _ in range(30):
        (job,) = server.post("/v1/tasks/reserve", wish).json["jobs"]
        path = f"/v1/reservations/{job['receipt']}/complete"
        assert server.post(path, {"result": "y" * 1_000_000}).status == 204
    before = memory(server)
    # when all are listed, then one small page has all of them
    for look in ("/v1/jobs", "/v1/jobs?task=js.part&state=succeeded"):
        answer = server.get(look)
        assert (len(answer.json["jobs"]), answer.json["cursor"]) == (30, None)
        assert len(answer.data) < 100_000
        assert not {"log", "body", "result"} & set(answer.json["jobs"][0])
    for look in pages:
        assert len(server.get(look).data) < 200_000
    with Tidemill(server.url) as mill:
        assert len(mill.jobs().page().records) == 30
    assert memory(server) - before < 20 * MB


def test_a_list_of_large_jobs_has_a_bound(start: Start) -> None:
    # given 25 jobs with 900 kB of headers
    server = start("--quiet")
    fill(server, "a", 25, body=1, headers={"trace": "x" * 900_000})
    # when they are listed
    ids: list[str] = []
    cursor = ""
    for _ in range(25):
        answer = server.get(f"/v1/jobs?limit=1000&cursor={cursor}")
        assert len(answer.data) < 10 * MB
        ids += [job["id"] for job in answer.json["jobs"]]
        cursor = answer.json["cursor"]
        if cursor is None:
            break
    # then all are there, once; and over the broker, too
    assert len(ids) == len(set(ids)) == 25
    with Tidemill(server.url) as mill:
        assert [job.id for job in mill.jobs(queue="a")] == ids


def ask(server: JobServer, name: str, **arguments: Any) -> tuple[Any, int]:
    """One call of the broker: its answer, and how many bytes that has."""
    headers = {"Content-Type": MEDIA, PROTOCOL: VERSION}
    answer = server.post(PATH + name, CALLS[name].write(arguments), headers=headers)
    assert answer.status == 200, answer.data
    return CALLS[name].read_answer(answer.data), len(answer.data)


def test_a_wait_for_many_large_jobs_has_a_bound(start: Start) -> None:
    # given 30 jobs of 900 kB
    server = start("--quiet")
    fill(server, "a", 30, body="x" * 900_000)
    with Tidemill(server.url) as mill:
        ids = [job.id for job in mill.jobs(queue="a")]
        # when all are waited for, then one answer has some of them
        records, size = ask(server, "wait_for", ids=ids, timeout=0.0)
        assert size < 10 * MB
        assert 1 < len(records) < 30
        # and a broker over HTTP gets all
        found = mill.broker.wait_for(ids, 0)
        assert [record and record.envelope.id for record in found] == ids
        # and is told when they end, also the last
        cancel = threading.Timer(0.5, mill.broker.cancel, [ids])
        cancel.start()
        found = mill.broker.wait_for(ids, 60)
        assert [record and record.state for record in found] == ["cancelled"] * 30


def test_an_exchange_with_many_large_jobs_has_a_bound(start: Start) -> None:
    # given 40 jobs of 900 kB, and a worker elsewhere that wants 1,000
    server = start("--quiet")
    fill(server, "a", 40, task="js.work", args=["x" * 900_000])
    ask(server, "attach", owner=Owner(id="w", kind="worker", name="w", lease=30.0))
    want, tokens = Want(1000), list[int]()
    while len(tokens) < 40:
        step = Step("w", want=want, serial=len(tokens) + 1)
        reply, size = ask(server, "exchange", step=step)
        # then each answer has some, within the bound, and says that there may be more
        assert size < 10 * MB
        assert reply.leases
        assert [lease.attempt for lease in reply.leases] == [1] * len(reply.leases)
        tokens += [lease.token for lease in reply.leases]
        assert len(tokens) == 40 or reply.next_due == 0
        # and nothing is handed out besides
        assert server.get("/v1/queues/a").json["running"] == len(tokens)
    # a step that is sent again is answered again, with what it handed out
    again, _ = ask(server, "exchange", step=step)
    assert [lease.token for lease in again.leases] == tokens[-len(again.leases) :]
    verdicts = [Verdict(token, Outcome.SUCCESS) for token in tokens]
    reply, _ = ask(server, "exchange", step=Step("w", verdicts, serial=1000))
    assert reply.settled == [True] * 40


def test_a_remote_worker_runs_many_large_jobs(start: Start) -> None:
    server = start("--quiet")
    fill(server, "a", 40, task="math.fsum", args=[[1.0] * 90_000])
    with Tidemill(server.url, allow_imports=["math.*"]) as mill:
        run_all(mill)
        assert server.get("/v1/queues/a").json["succeeded"] == 40


def test_unread_answers_share_a_bound(start: Start) -> None:
    # given lists of some megabytes, and clients that read none of theirs
    server = start("--quiet", "--max-memory", str(16 * MB))
    fill(server, "a", 20, body=1, headers={"trace": "x" * 900_000})
    call = CALLS["find"].write({"what": Filter(), "limit": 1000, "cursor": ""})
    look = b"GET /v1/jobs?limit=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    find = (
        f"POST {PATH}find HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MEDIA}\r\n"
        f"{PROTOCOL}: {VERSION}\r\nContent-Length: {len(call)}\r\n\r\n"
    ).encode() + call
    for request in (look, find):
        socks = [connect(server, request, 4096) for _ in range(6)]
        heads = [sock.recv(12, socket.MSG_WAITALL) for sock in socks]
        # then some are refused, and are served once the others have gone
        assert set(heads) == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        for sock in socks:
            sock.close()
        eventually(lambda: server.get("/v1/jobs?limit=1000").status == 200)


def test_unread_streams_share_their_snapshots(start: Start) -> None:
    # given a store whose queues take a megabyte to show
    server = start("--quiet")
    jobs = [{"queue": f"{n}-{'q' * 100}", "body": 1} for n in range(3000)]
    assert server.post("/v1/jobs/batch", {"jobs": jobs}).status == 201
    assert len(server.get("/v1/queues").data) > 900_000
    least = memory(server)
    # when 150 clients watch them, and read nothing
    request = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    socks = [connect(server, request) for _ in range(150)]
    for sock in socks:
        assert sock.recv(1, socket.MSG_PEEK)
    time.sleep(1.5)
    # then the server has grown by little, and a listener that reads hears of changes
    assert memory(server) - least < 70 * MB
    with server.stream("/v1/events") as events:
        assert next(events)[0] == "queues"
        server.post("/v1/jobs", {"queue": "new", "body": 1})
        assert any(queue["name"] == "new" for queue in next(events)[1]["queues"])
    for sock in socks:
        sock.close()


JSON = {"Content-Type": "application/json"}


def test_a_job_whose_json_is_far_too_large_is_refused_unread(start: Start) -> None:
    server = start("--quiet")
    nested = b'{"queue": "a", "body": [' + b",".join([b"[]"] * 4_000_000) + b"]}"
    for method, path, body, where in [
        ("POST", "/v1/jobs", nested, ""),
        ("PUT", "/v1/jobs/a", nested, ""),
        ("POST", "/v1/queues/a/messages", nested, ""),
        ("POST", "/v1/jobs/batch", b'{"jobs": [{"body": 1}, %s]}' % nested, "jobs[1]: "),
    ]:
        begun = time.monotonic()
        answer = server.request(method, path, body, headers=JSON)
        assert answer.status == 413
        assert answer.json["detail"].startswith(f"{where}the job has ")
        assert time.monotonic() - begun < 20
