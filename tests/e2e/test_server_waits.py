"""Clients of a job server that wait for jobs to end: many of them, and few threads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import psutil
import pytest
from servers.http import JobServer

from tidemill import Tidemill
from tidemill.brokers.calls import CALLS, MEDIA, PATH, PROTOCOL, VERSION
from tidemill.job import Record

COUNT = 600


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


async def ask(port: int, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


@pytest.mark.parametrize("way", ["result", "call"])
def test_many_waits_for_jobs_need_few_threads(server: JobServer, way: str) -> None:
    # given many jobs, and a client that waits for each
    with Tidemill(server.url, allow_imports=["*"]) as mill:
        jobs = mill.enqueue_many(mill.call("math.sqrt", n).using(delay=600) for n in range(COUNT))
    ids = [job.id for job in jobs]

    async def main() -> None:
        lines = [await ask(server.port, request) for request in requests(ids, way)]
        await asyncio.sleep(1.0)
        assert threads(server) < 250
        # when one more comes, and its job ends
        begun = time.monotonic()
        assert server.post(f"/v1/jobs/{ids[0]}/cancel").status == 204
        await asyncio.wait_for(answer(lines[0][0]), 30)
        assert time.monotonic() - begun < 5
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

    asyncio.run(main())


def test_a_wait_ends_when_its_client_goes_and_when_the_server_does(server: JobServer) -> None:
    with Tidemill(server.url, allow_imports=["*"]) as mill:
        jobs = mill.enqueue_many(mill.call("math.sqrt", n).using(delay=600) for n in range(20))
    ids = [job.id for job in jobs]

    async def main() -> None:
        asked = requests(ids, "result") + requests(ids, "call")
        lines = [await ask(server.port, request) for request in asked]
        await asyncio.sleep(0.3)
        for _, writer in lines[::2]:
            writer.close()
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        assert await asyncio.to_thread(server.end) == 0
        assert time.monotonic() - begun < 10
        for _, writer in lines:
            writer.close()

    asyncio.run(main())
