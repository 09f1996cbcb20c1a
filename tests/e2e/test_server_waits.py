"""Clients of a job server that wait for jobs to end: many of them, and few threads."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from harness import SLACK
from in_loop import in_loop
from servers.http import JobServer

from tidemill import Tidemill
from tidemill.brokers.contract.rpc import CALLS, MEDIA, PATH, PROTOCOL, VERSION
from tidemill.core.job import Record

COUNT = 600
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def server() -> Iterator[JobServer]:
    server = JobServer("--quiet")
    yield server
    server.close()


def threads(server: JobServer) -> int:
    assert server.pid
    return int(psutil.Process(server.pid).num_threads())


def requests(ids: list[str], way: str) -> list[bytes]:
    """One request for each job, which waits until the job has ended."""
    if way == "result":
        line = "GET /v1/jobs/%s/result?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        return [(line % job_id).encode() for job_id in ids]
    call = CALLS["wait_for"]
    head = (
        f"POST {PATH}wait_for HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MEDIA}\r\n"
        f"{PROTOCOL}: {VERSION}\r\nContent-Length: %d\r\n\r\n"
    ).encode()
    given = [{"ids": [i], "timeout": 60.0, "first": n % 2 == 0} for n, i in enumerate(ids)]
    bodies = [call.write(arguments) for arguments in given]
    return [head % len(body) + body for body in bodies]


async def ask(port: int, request: bytes) -> Line:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    return reader, writer


def close(lines: list[Line]) -> None:
    for _, writer in lines:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


@pytest.mark.parametrize("way", ["result", "call"])
@in_loop
async def test_many_waits_for_jobs_need_few_threads(server: JobServer, way: str) -> None:
    # given many jobs, and a client that waits for each
    with Tidemill(server.url, allow_imports=["*"]) as mill:
        jobs = mill.enqueue_many(mill.call("math.sqrt", n).using(delay=600) for n in range(COUNT))
    ids = [job.id for job in jobs]
    lines = [await ask(server.port, request) for request in requests(ids, way)]
    await asyncio.sleep(1.0)
    assert threads(server) < 250
    # when one more comes, and its job ends
    begun = time.monotonic()
    assert server.post(f"/v1/jobs/{ids[0]}/cancel").status == 204
    await asyncio.wait_for(answer(lines[0][0]), 30)
    assert time.monotonic() - begun < 5 + SLACK
    # and when the others end
    assert all(server.post("/v1/jobs/cancel", {"ids": ids[1:]}).json["done"])
    # then each is told
    for job_id, (reader, _) in list(zip(ids, lines, strict=True))[1:]:
        body = await asyncio.wait_for(answer(reader), 30)
        if way == "result":
            assert json.loads(body)["id"] == job_id
            assert json.loads(body)["state"] == "cancelled"
        else:
            (record,) = CALLS["wait_for"].read_answer(body)
            assert isinstance(record, Record)
            assert (record.envelope.id, record.state) == (job_id, "cancelled")
    for _, writer in lines:
        writer.close()


def broker_call(name: str, **arguments: Any) -> bytes:
    body = CALLS[name].write(arguments)
    head = (
        f"POST {PATH}{name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MEDIA}\r\n"
        f"{PROTOCOL}: {VERSION}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def full(server: JobServer, *queues: str) -> None:
    """Make queues that have a job each, and room for no other."""
    for queue in queues:
        assert server.post("/v1/jobs", {"queue": queue, "body": 1}).status == 201
        assert server.request("PATCH", f"/v1/queues/{queue}", {"max_size": 1}).status == 200


def quickest_put(server: JobServer) -> float:
    """Seconds that a put of another client takes; the machine may be slow for a moment."""

    def put() -> float:
        begun = time.monotonic()
        assert server.post("/v1/jobs", {"queue": "b", "body": 1}).status == 201
        return time.monotonic() - begun

    return min(put() for _ in range(5))


async def told(line: Line, name: str, **arguments: Any) -> None:
    """Wait for what the call waits for. A call without it ends after 25 s, and is sent again."""
    reader, writer = line
    while not CALLS[name].read_answer(await answer(reader)):
        writer.write(broker_call(name, **arguments))


async def waiting(port: int, name: str, **arguments: Any) -> tuple[Line, asyncio.Future[None]]:
    """A connection on which a call waits, and what is done when the wait is over."""
    arguments["timeout"] = 25.0
    line = await ask(port, broker_call(name, **arguments))
    return line, asyncio.ensure_future(told(line, name, **arguments))


@in_loop
async def test_many_waits_for_room_need_few_threads(server: JobServer) -> None:
    # given a full queue, and 2,000 clients that wait for room in it
    full(server, "a")
    waits = [await waiting(server.port, "wait_space", queue="a") for _ in range(2000)]
    await asyncio.sleep(1.0)
    assert threads(server) < 150
    # then another client is served
    assert quickest_put(server) < 1
    # when there is room
    assert not any(each.done() for _, each in waits)
    assert server.post("/v1/queues/a/purge").status == 200
    # then all waiting calls return
    await asyncio.wait_for(asyncio.gather(*(each for _, each in waits)), 60)
    close([line for line, _ in waits])


@in_loop
async def test_waits_for_room_in_many_queues_take_turns(server: JobServer) -> None:
    # given more full queues than the server watches at a time
    names = [f"q{n}" for n in range(100)]
    full(server, *names)
    waits = [await waiting(server.port, "wait_space", queue=name) for name in names]
    await asyncio.sleep(0.5)
    assert threads(server) < 150
    # when one queue has room, then only the calls that wait for that queue return
    assert server.post("/v1/queues/q77/purge").status == 200
    await asyncio.wait_for(waits[77][1], 30)
    assert sum(each.done() for _, each in waits) == 1
    # and the server ends in time
    for _, each in waits:
        each.cancel()
    begun = time.monotonic()
    assert await asyncio.to_thread(server.end) == 0
    assert time.monotonic() - begun < 10 + SLACK
    close([line for line, _ in waits])


def test_a_queue_with_room_needs_no_wait(server: JobServer) -> None:
    with Tidemill(server.url) as mill:
        full(server, "a")
        assert mill.broker.wait_space("a", 0) is False
        assert mill.broker.wait_space("never seen", 0) is True
        assert mill.broker.wait_space("never seen", 30) is True
        # a put that waits for room is made once there is some
        purge = threading.Timer(0.5, server.post, ["/v1/queues/a/purge"])
        purge.start()
        mill.queue("a").put(2, timeout=30)
        assert server.get("/v1/queues/a").json["ready"] == 1


@in_loop
async def test_a_wait_ends_when_its_client_goes_and_when_the_server_does(server: JobServer) -> None:
    with Tidemill(server.url, allow_imports=["*"]) as mill:
        jobs = mill.enqueue_many(mill.call("math.sqrt", n).using(delay=600) for n in range(20))
    ids = [job.id for job in jobs]
    asked = requests(ids, "result") + requests(ids, "call")
    lines = [await ask(server.port, request) for request in asked]
    await asyncio.sleep(0.3)
    for _, writer in lines[::2]:
        writer.close()
    await asyncio.sleep(0.3)
    begun = time.monotonic()
    assert await asyncio.to_thread(server.end) == 0
    assert time.monotonic() - begun < 10 + SLACK
    for _, writer in lines:
        writer.close()
