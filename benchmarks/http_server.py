"""What `tidemill server` bears over HTTP: puts, batches, wake-ups, clients that only wait.

    python benchmarks/http_server.py [--seconds 5] [--only puts,batches,wakeups,reserves,idle]

A server of its own on a durable LMDB store in a temporary folder; the clients are in another
process and speak raw bytes over sockets, so that they are not what is measured. With one machine
for both, what they take is taken from the server all the same. Prints one JSON line a measure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
import uvloop


class Client(asyncio.Protocol):
    """One connection that sends ready-made requests and tells when each was answered."""

    def __init__(self) -> None:
        self.buffer = b""
        self.waiting: asyncio.Future[bytes] | None = None
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        start = self.buffer.find(b"content-length: ") + 16
        length = 0  # an answer with no body has none
        if start > 16:
            length = int(self.buffer[start : self.buffer.index(b"\r\n", start)])
        if len(self.buffer) < head + 4 + length:
            return
        answer, self.buffer = self.buffer, b""
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_exception(ConnectionError("closed"))

    def call(self, request: bytes) -> asyncio.Future[bytes]:
        """The answer to a request, whole."""
        self.waiting = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.waiting


async def connect(port: int, count: int) -> list[Client]:
    """So many connections."""
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(count):
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        clients.append(client)
    return clients


def request(path: str, body: Any) -> bytes:
    """A POST, ready to send."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def percentile(values: list[float], share: float) -> float:
    """In milliseconds."""
    values = sorted(values)
    return round(values[min(len(values) - 1, int(len(values) * share))] * 1000, 2)


async def hammer(port: int, clients: int, seconds: float, data: bytes) -> dict[str, Any]:
    """So many clients that send one request after the other."""
    found = await connect(port, clients)
    took: list[float] = []
    until = time.perf_counter() + seconds

    async def one(client: Client) -> None:
        while (began := time.perf_counter()) < until:
            answer = await client.call(data)
            assert answer.startswith((b"HTTP/1.1 201", b"HTTP/1.1 200")), answer
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(one, found))
    spent = time.perf_counter() - began
    for client in found:
        client.transport.close()
    return {
        "requests_per_second": round(len(took) / spent),
        "p50_ms": percentile(took, 0.5),
        "p99_ms": percentile(took, 0.99),
    }


async def puts(port: int, seconds: float) -> dict[str, Any]:
    """64 clients put one message at a time."""
    return await hammer(
        port, 64, seconds, request("/v1/jobs", {"queue": "puts", "body": {"order": 17}})
    )


async def raw_puts(port: int, seconds: float) -> dict[str, Any]:
    """The same by the way for raw messages."""
    return await hammer(port, 64, seconds, request("/v1/queues/raw/messages", {"order": 17}))


async def batches(port: int, seconds: float) -> dict[str, Any]:
    """4 clients put 100 messages at a time."""
    body = {"jobs": [{"queue": "batches", "body": {"order": n}} for n in range(100)]}
    found = await hammer(port, 4, seconds, request("/v1/jobs/batch", body))
    return found | {"jobs_per_second": found["requests_per_second"] * 100}


async def reserves(port: int, seconds: float) -> dict[str, Any]:
    """64 clients take one message at a time and acknowledge it."""
    filling = {"jobs": [{"queue": "taken", "body": n} for n in range(1000)]}
    (filler,) = await connect(port, 1)
    for _ in range(int(seconds * 5)):
        await filler.call(request("/v1/jobs/batch", filling))
    clients = await connect(port, 64)
    taking = request("/v1/reserve", {"queues": ["taken"], "timeout": 1})
    done, until = 0, time.perf_counter() + seconds

    async def one(client: Client) -> None:
        nonlocal done
        while time.perf_counter() < until:
            answer = await client.call(taking)
            for job in json.loads(answer[answer.index(b"\r\n\r\n") :])["jobs"]:
                path = f"/v1/reservations/{job['receipt']}/ack"
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
                assert (await client.call(head.encode())).startswith(b"HTTP/1.1 204")
                done += 1

    began = time.perf_counter()
    await asyncio.gather(*map(one, clients))
    return {"taken_and_acked_per_second": round(done / (time.perf_counter() - began))}


async def wakeups(port: int, seconds: float) -> dict[str, Any]:
    """From before a put is sent to when a client that waits has the message, and others wait."""
    waiter, producer = await connect(port, 2)
    others = await connect(port, 20)
    waiting = request("/v1/reserve", {"queues": ["elsewhere"], "timeout": 60})
    polls = [other.call(waiting) for other in others]
    took, acks = [], []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        poll = waiter.call(request("/v1/reserve", {"queues": ["woken"], "timeout": 30}))
        await asyncio.sleep(0.02)
        began = time.perf_counter()
        put = producer.call(request("/v1/jobs", {"queue": "woken", "body": 1}))
        answer = await poll
        took.append(time.perf_counter() - began)
        acks.append(json.loads(answer[answer.index(b"\r\n\r\n") :])["jobs"][0]["receipt"])
        await put
    await producer.call(request("/v1/ack", {"receipts": acks[:10_000]}))
    for poll in polls:
        poll.cancel()
    return {"p50_ms": percentile(took, 0.5), "p99_ms": percentile(took, 0.99)}


async def idle(port: int, seconds: float, pid: int = 0) -> dict[str, Any]:
    """2,000 clients that poll for 60 s each, spread evenly; what the server takes of a core."""
    clients = await connect(port, 2000)
    every = request("/v1/reserve", {"queues": ["nothing"], "timeout": 60})

    async def one(client: Client, first: float) -> None:
        head = request("/v1/reserve", {"queues": ["nothing"], "timeout": max(first, 0.01)})
        await client.call(head)
        while True:
            await client.call(every)

    tasks = [asyncio.ensure_future(one(c, n * 60 / 2000)) for n, c in enumerate(clients)]
    await asyncio.sleep(5)
    process = psutil.Process(pid)
    before, began = sum(process.cpu_times()[:2]), time.perf_counter()
    await asyncio.sleep(max(60.0, seconds))
    spent = sum(process.cpu_times()[:2]) - before
    share = spent / (time.perf_counter() - began)
    for task in tasks:
        task.cancel()
    memory = process.memory_info().rss >> 20
    return {"percent_of_a_core": round(share * 100, 2), "memory_mb": memory}


MEASURES: dict[str, Callable[..., Any]] = {
    "puts": puts,
    "raw_puts": raw_puts,
    "batches": batches,
    "reserves": reserves,
    "wakeups": wakeups,
    "idle": idle,
}


def free_port() -> int:
    """One of 127.0.0.1 that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def server(options: list[str]) -> Any:
    """A server on a store of its own: (port, pid)."""
    folder, port = tempfile.mkdtemp(prefix="tidemill-bench-"), free_port()
    command = [sys.executable, "-m", "tidemill", "server", f"lmdb://{folder}/store"]
    with open(os.path.join(folder, "log"), "wb") as log:
        process = subprocess.Popen([*command, "--port", str(port), *options], stderr=log)
    try:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "the server did not start"
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.05)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def run_clients(name: str, port: int, seconds: float, pid: int) -> dict[str, Any]:
    """One measure, in this process."""
    more = {"pid": pid} if name == "idle" else {}
    return dict(uvloop.run(MEASURES[name](port, seconds, **more)))


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", default=",".join(MEASURES))
    parser.add_argument("--server-option", action="append", default=[])
    given = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with server(given.server_option) as (port, pid), spawn.Pool(1) as pool:
        for name in given.only.split(","):
            before = sum(psutil.Process(pid).cpu_times()[:2])
            found = pool.apply(run_clients, (name, port, given.seconds, pid))
            found["server_cpu_s"] = round(sum(psutil.Process(pid).cpu_times()[:2]) - before, 2)
            found["load"] = round(os.getloadavg()[0], 1)
            print(json.dumps({"measure": name, **found}), flush=True)


if __name__ == "__main__":
    main()
