"""Bounds of the job server's connections: pipelines, heads, TLS handshakes, offers to upgrade."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from servers.http import InHand, JobServer, certificate

from tidemill.server import tokens
from tidemill.server.tokens import Role

MB = 1 << 20
Start = Callable[..., JobServer]


def connect(server: JobServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 30)


def memory(server: JobServer) -> int:
    assert server.pid
    return int(psutil.Process(server.pid).memory_info().rss)


def fill(socks: list[socket.socket], data: bytes, seconds: float) -> None:
    """Send as much of ``data`` to each as is taken, for this long."""
    left = dict.fromkeys(socks, memoryview(data))
    until = time.monotonic() + seconds
    for sock in socks:
        sock.setblocking(False)
    while left and time.monotonic() < until:
        for sock, rest in list(left.items()):
            try:
                left[sock] = rest[sock.send(rest) :]
            except BlockingIOError:
                continue
            except OSError:
                del left[sock]
        time.sleep(0.01)


POLL = b'{"queues": ["none"], "timeout": 60}'
LONG_POLL = (
    b"POST /v1/reserve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(POLL), POLL)
)


@pytest.mark.parametrize("before", [b"", LONG_POLL], ids=["alone", "behind long polls"])
def test_a_flood_of_pipelined_requests_takes_little_memory(
    start: Start, tmp_path: Path, before: bytes
) -> None:
    # given a server, with tokens unless its clients may poll
    auth = tmp_path / "tokens.json"
    tokens.create(auth, "somebody", Role.VIEWER)
    options = () if before else ("--auth", str(auth))
    server = start("--quiet", *options)
    assert server.get("/health").status == 200
    least = memory(server)
    # when 200 clients without a token send requests of 31 bytes and read no answer
    socks = [connect(server) for _ in range(200)]
    for sock in socks:
        sock.sendall(before)
    fill(socks, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60_000, 3.0)
    # then the server serves others, and has grown by little
    assert server.get("/health").status == 200
    assert memory(server) - least < 150 * MB
    for sock in socks:
        sock.close()


def test_pipelined_requests_are_answered_in_order(start: Start) -> None:
    server = start("--quiet")
    put = b'{"queue": "q", "body": %d}'
    requests = b""
    for n in range(200):
        body = put % n
        requests += (
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        if n % 2:
            requests += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        else:
            sized = (len(body), body)
            requests += b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % sized
    with connect(server) as sock:
        # cut at odd places, so that heads and bodies arrive in pieces
        for at in range(0, len(requests), 997):
            sock.sendall(requests[at : at + 997])
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = sock.makefile("rb").read()
    assert answers.count(b"HTTP/1.1 201 ") == 200
    assert answers.count(b"HTTP/1.1 200 ") == 1
    got = server.reserve("q", count=200)
    assert [job["body"] for job in got] == list(range(200))


def test_stalled_tls_handshakes_take_little_memory(start: Start, tmp_path: Path) -> None:
    # given a server with a certificate
    cert, key = certificate(tmp_path, "server")
    server = start("--quiet", "--tls-cert", str(cert), "--tls-key", str(key))
    context = ssl.create_default_context(cafile=str(cert))

    def is_served() -> bool:
        with (
            connect(server) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as sock,
        ):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return sock.recv(100).startswith(b"HTTP/1.1 200")

    assert is_served()
    least = memory(server)
    # when 900 clients connect and do not go on with TLS
    stalled = [connect(server) for _ in range(900)]
    # then another is served, and the server has grown by little
    assert is_served()
    assert memory(server) - least < 150 * MB
    for sock in stalled:
        sock.close()


@pytest.mark.parametrize("name", ["Upgrade", "upgrade", "UPGRADE", "uPgRaDe"])
def test_a_request_that_offers_an_upgrade_keeps_its_body(start: Start, name: str) -> None:
    # given the head that Java's HttpClient sends in the clear
    server = start("--quiet")
    body = b"\x00the whole message\xff" * 10
    head = (
        f"POST /v1/queues/q/messages HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        f"Content-Length: {len(body)}\r\nHost: localhost\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
        f"{name}: h2c\r\nContent-Type: application/octet-stream\r\n\r\n"
    ).encode()
    # when two such requests come by one connection
    with connect(server) as sock:
        for _ in range(2):
            sock.sendall(head + body)
            response = http.client.HTTPResponse(sock)
            response.begin()
            assert (response.status, response.read()[:5]) == (201, b'{"id"')
    # then both messages have their bodies
    assert bodies(server) == [body, body]


def bodies(server: JobServer) -> list[bytes]:
    """The messages of the queue q, as they were put."""
    jobs = server.reserve("q", count=10)
    assert all(job["encoding"] == "base64" for job in jobs), jobs
    return [base64.b64decode(job["body"]) for job in jobs]


def test_a_revoked_token_loses_its_polls_and_streams(
    start: Start, tmp_path: Path
) -> None:  # case S9
    # given a token that polls and follows events, and another that does as well
    auth = tmp_path / "tokens.json"
    secrets = {name: tokens.create(auth, name, Role.OPERATOR) for name in ("old", "other")}
    server = start("--quiet", "--auth", str(auth))

    def ask(name: str, request: bytes) -> socket.socket:
        sock = connect(server)
        line, _, rest = request.partition(b"\r\n")
        sock.sendall(line + f"\r\nAuthorization: Bearer {secrets[name]}\r\n".encode() + rest)
        return sock

    events = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lost = [ask("old", LONG_POLL), ask("old", events)]
    kept = [ask("other", LONG_POLL), ask("other", events)]
    assert lost[1].recv(65536).startswith(b"HTTP/1.1 200")
    # when it is revoked
    tokens.revoke(auth, "old")
    # then its connections end, and the others stay
    for sock in lost:
        with contextlib.suppress(ConnectionError):
            while sock.recv(65536):
                pass
    server.token = secrets["other"]
    server.post("/v1/jobs", {"queue": "none", "body": 1})
    assert kept[0].recv(65536).startswith(b"HTTP/1.1 200")
    for sock in (*lost, *kept):
        sock.close()


def test_refused_requests_count_for_the_rate(start: Start, tmp_path: Path) -> None:
    auth = tmp_path / "tokens.json"
    tokens.create(auth, "known", Role.VIEWER)
    server = start("--quiet", "--auth", str(auth), "--rate", "1")
    statuses = [server.get("/v1/queues").status for _ in range(6)]
    assert statuses[0] == 401
    assert 429 in statuses


def test_health_is_answered_beside_large_bodies_in_flight(start: Any) -> None:
    # Given large bodies, of which the server has read a half.
    server = start()
    body = json.dumps({"queue": "a", "body": ["x" * 100] * 5000}).encode()
    flights = [InHand(server.port, "POST", "/v1/jobs", body) for _ in range(5)]
    for flight in flights:
        flight.send(body[: len(body) // 2])
    # Then the server answers others, and takes the bodies when they are complete.
    for path in ("/health", "/ready"):
        assert server.get(path).status == 200
    for flight in flights:
        flight.send(body[len(body) // 2 :])
    assert [flight.answer().status for flight in flights] == [201] * 5
