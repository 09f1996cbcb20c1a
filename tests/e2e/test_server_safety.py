"""A server under attack, under signals and under kill: nobody gets in, nothing is lost."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import json
import re
import signal
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import alive, eventually
from servers import redis_url
from servers.http import certificate

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Owner
from tidemill.errors import InvalidOption
from tidemill.server import tokens
from tidemill.server.run import serve
from tidemill.server.settings import Settings
from tidemill.server.tokens import Role

# -- the end --------------------------------------------------------------------------------------


@pytest.mark.everyday
def test_confirmed_jobs_survive_a_kill(start: Any) -> None:
    """Law 1, over HTTP: with many clients at once, and the server killed in the middle."""
    server, kept = start("--quiet"), []

    def produce(number: int) -> None:
        for n in range(10_000):
            try:
                answer = server.post("/v1/jobs", {"queue": "kept", "body": [number, n]})
            except (OSError, http.client.HTTPException):
                return
            assert answer.status == 201
            kept.append(answer.json["id"])

    producers = [threading.Thread(target=produce, args=(n,)) for n in range(4)]
    for producer in producers:
        producer.start()
    eventually(lambda: len(kept) >= 50, "some puts")
    server.kill()
    for producer in producers:
        producer.join(30)
    server.start()
    for job_id in kept:
        assert server.get(f"/v1/jobs/{job_id}").status == 200, job_id


@pytest.mark.everyday
def test_long_polls_are_answered_at_a_shutdown(start: Any) -> None:
    server = start()
    job = server.post("/v1/jobs", {"task": "math.sqrt", "args": [2], "queue": "q"}).json["id"]
    asked = {"queues": ["none"], "timeout": 120}
    polls = [server.begin("POST", "/v1/reserve", asked) for _ in range(5)]
    for poll in polls:
        poll.send()
    waits = server.begin("GET", f"/v1/jobs/{job}/result?wait=120")
    assert server.end() == 0
    for poll in polls:
        answer = poll.answer()
        assert (answer.status, answer.json) == (200, {"jobs": []})
    late = waits.answer()
    assert (late.status, late.json["state"]) == (202, "ready")


def test_streams_end_with_the_server(start: Any) -> None:
    server = start()
    with server.stream("/v1/events") as events:
        next(events)
        assert server.end() == 0
        assert all(name == "queues" for name, _ in events)


def test_a_second_signal_stops_at_once(start: Any) -> None:
    # given a request that will not come to its end
    server = start()
    request = server.begin("POST", "/v1/jobs", {"queue": "a", "body": 1})
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: "ending" in server.output, "the first signal")
    time.sleep(0.5)  # within a moment two signals count as one
    assert server.process.poll() is None
    assert server.end() == 0
    request.close()


def test_an_open_request_is_finished_at_a_shutdown(start: Any) -> None:
    server = start()
    server.post("/v1/jobs", {"queue": "done", "body": 1})
    (done,) = server.reserve("done")
    assert server.post("/v1/ack", {"receipts": [done["receipt"]]}).json == {"done": [True]}
    request = server.begin("POST", "/v1/jobs", {"queue": "last", "body": "x" * 1000})
    request.send(request.body[:100])
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: "ending" in server.output, "the signal")
    request.send(request.body[100:])
    assert request.answer().status == 201
    assert server.process.wait(30) == 0
    with Tidemill(server.where) as mill:
        assert mill.queue("last").size() == 1
        assert mill.broker.owners() == []  # none of its clients holds anything


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_receipts_outlive_the_server(start: Any, signum: int) -> None:
    # given messages in the hands of clients
    server = start("--quiet")
    for n in range(4):
        server.post("/v1/jobs", {"queue": "held", "body": n, "ttr": 600})
    asked = {"queues": ["held"], "count": 3}
    held = [job["receipt"] for job in server.post("/v1/reserve", asked).json["jobs"]]
    # when the server ends, and another is started
    server.kill(signum)
    server.start()
    # then they are still theirs, and can be settled
    paths = [f"/v1/reservations/{receipt}" for receipt in held]
    rest = server.post("/v1/reserve", asked).json["jobs"]
    assert [job["body"] for job in rest] == [3]
    assert server.post(f"{paths[0]}/touch", {"ttr": 700}).status == 204
    assert server.post(f"{paths[0]}/ack").status == 204
    assert server.post(f"{paths[0]}/release").status == 409
    assert server.post(f"{paths[1]}/release").status == 204
    assert server.post("/v1/ack", {"receipts": [*held, "nix"]}).json == {
        "done": [True, False, True, False]
    }
    assert [job["body"] for job in server.post("/v1/reserve", asked).json["jobs"]] == [1]


def test_a_receipt_is_valid_at_every_server_of_a_store(start: Any) -> None:
    """Behind one name, say; what is settled at the other holds up nothing at the first."""
    # given two servers of one store, and messages that the one has handed out
    url = f"{redis_url()}?prefix=t{new_id()}"
    one, other = start("--quiet", where=url), start("--quiet", where=url)
    for n in range(4):
        one.post("/v1/jobs", {"queue": "held", "body": n, "ttr": 600})
    asked = {"queues": ["held"], "count": 3}
    held = one.post("/v1/reserve", asked).json["jobs"]
    paths = [f"/v1/reservations/{job['receipt']}" for job in held]
    # when
    assert other.post(f"{paths[0]}/ack").status == 204
    assert other.post(f"{paths[1]}/release").status == 204
    # then
    assert one.post(f"{paths[2]}/ack").status == 204
    assert other.post(f"{paths[2]}/ack").status == 409
    assert [job["body"] for job in one.post("/v1/reserve", asked).json["jobs"]] == [1, 3]


def test_no_receipt_settles_a_job_of_a_worker(start: Any) -> None:  # case S7
    # its jobs are its own
    server = start("--quiet")
    broker = open_broker(server.url)
    owner = Owner(id=new_id(), kind="worker", name="w")
    broker.attach(owner)
    broker.exchange(Step(owner.id))
    for act in ("ack", "release", "touch", "bury"):
        answer = server.post(f"/v1/reservations/{owner.id}.0/{act}", {})
        assert answer.status == 404
        assert "is not a valid receipt" in answer.json["detail"]
    assert server.post("/v1/ack", {"receipts": [f"{owner.id}.0"]}).json == {"done": [False]}
    assert broker.exchange(Step(owner.id)).commands == []
    broker.close()


# -- who may come in ------------------------------------------------------------------------------


@pytest.mark.everyday
def test_fields_behind_the_body_are_no_headers(start: Any, tmp_path: Path) -> None:  # case S11
    """Case M12: a proxy in front does not check the trailer of a chunked body."""
    path = tmp_path / "tokens.json"
    token = tokens.create(path, "o", Role.OPERATOR)
    server = start("--auth", str(path), "--quiet")

    def put(head: str, trailer: str) -> bytes:
        request = "POST /v1/queues/q/messages HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        request += f"{head}Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n{trailer}\r\n"
        with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
            sock.sendall(request.encode())  # all of the request in one segment
            return b"".join(iter(lambda: sock.recv(4096), b"")).partition(b"\r\n")[0]

    granted = f"Authorization: Bearer {token}\r\n"
    assert b" 401 " in put("", granted)
    assert b" 201 " in put(granted, "")
    assert b" 201 " in put(granted, "Authorization: Bearer nix\r\nContent-Encoding: gzip\r\n")
    assert b" 400 " in put(granted * 2, "")


def test_tls_and_certificates_of_clients(start: Any, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    theirs, their_key = certificate(tmp_path, "client")
    given = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(theirs))
    server = start(*given)

    def ask(context: ssl.SSLContext, request: str = "GET /v1/queues") -> bytes:
        with (
            socket.create_connection(("127.0.0.1", server.port), 30) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as sock,
        ):
            head = f"{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            sock.sendall(head.encode())
            return b"".join(iter(lambda: sock.recv(4096), b""))

    stranger = ssl.create_default_context(cafile=str(cert))
    try:
        assert ask(stranger) == b""  # or it is told why, in TLS's own words
    except OSError:
        pass
    known = ssl.create_default_context(cafile=str(cert))
    known.load_cert_chain(theirs, their_key)
    assert ask(known).startswith(b"HTTP/1.1 200")
    assert ask(known, "POST /v1/queues/a/pause").startswith(b"HTTP/1.1 20")
    refused = ask(known, "POST /v1/queues/a/purge")
    assert refused.startswith(b"HTTP/1.1 403")
    assert b"needs the role admin; a certificate without a token has the role operator" in refused


def test_unusable_tls_files_are_named(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    _, another = certificate(tmp_path, "another")
    spoilt = tmp_path / "spoilt.pem"
    spoilt.write_text("none")
    missing = tmp_path / "missing.pem"
    for options, said in [
        ((missing, key), f"--tls-cert {missing} cannot be used: No such file"),
        ((cert, missing), f"--tls-key {missing} cannot be used: No such file"),
        ((cert, another), f"--tls-cert {cert} and --tls-key {another} cannot be used together"),
        ((spoilt, key), f"--tls-cert {spoilt} and --tls-key {key} cannot be used together"),
        ((cert, key, missing), f"--tls-ca {missing} cannot be used: No such file"),
        ((cert, key, spoilt), f"--tls-ca {spoilt} cannot be used: "),
    ]:
        given = dict(zip(("tls_cert", "tls_key", "tls_ca"), map(str, options), strict=False))
        with Tidemill("memory://") as mill, pytest.raises(InvalidOption, match=re.escape(said)):
            serve(mill, Settings(**given))


# -- too much, too slow ---------------------------------------------------------------------------


def test_bodies_are_bounded(start: Any) -> None:  # case S14
    server = start("--max-request", "2000")
    fits = server.post("/v1/jobs", {"queue": "a", "body": "x" * 1000})
    assert fits.status == 201
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n"
        sock.sendall(head + b"Content-Length: 2001\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        sock.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        sock.sendall(b"3e9\r\n" + b" " * 1001 + b"\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_a_client_that_sends_too_much_gets_its_answer(start: Any) -> None:
    """Though it reads only when it has sent everything."""
    server = start("--max-request", "2000")
    for _ in range(3):
        answer = server.post("/v1/jobs", b" " * 10_000_000)
        assert (answer.status, answer.json["type"]) == (413, "urn:tidemill:problem:too-large")


def test_heads_are_bounded(start: Any) -> None:  # case S14
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        answer = b""
        try:
            for _ in range(200):
                sock.sendall(b"X-Long: " + b"x" * 1000 + b"\r\n")
            answer = sock.recv(100)
        except OSError:  # it was closed while we still wrote
            pass
        assert answer[:12] in (b"", b"HTTP/1.1 400")
    assert server.get("/health").status == 200


def test_bodies_that_are_nested_without_end_are_refused(start: Any) -> None:
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        body = b"[" * 100_000
        head = b"POST /v1/queues/q/messages HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        sock.sendall(head + body)
        assert sock.recv(100).startswith(b"HTTP/1.1 400")


def test_slow_clients_are_cut_off_and_do_not_disturb_others(start: Any) -> None:
    server = start("--body-timeout", "1")
    beginnings = [b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"]
    beginnings.append(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + beginnings[-1])
    slow = []
    for beginning in beginnings * 20:
        sock = socket.create_connection(("127.0.0.1", server.port), 30)
        sock.sendall(beginning)
        slow.append(sock)
    assert server.post("/v1/jobs", {"queue": "a", "body": 1}).status == 201
    for sock in slow:
        with sock, sock.makefile("rb") as answers:
            assert answers.read().rpartition(b"HTTP/1.1 ")[2].startswith(b"408")


def test_connections_are_bounded(start: Any) -> None:  # case S14
    server = start("--max-connections", "5")
    with socket.create_connection(("127.0.0.1", server.port), 30) as first:
        others = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(10)]
        for sock in others[4:]:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(100) == b""
        # those that were there before are served
        first.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        for sock in others:
            sock.close()

    def is_served() -> bool:
        with contextlib.suppress(ConnectionError):  # it was closed before it had sent its request
            return server.get("/health").status == 200
        return False

    eventually(is_served, "room again")


def test_requests_are_bounded(start: Any) -> None:  # case S14
    server = start("--rate", "1")
    statuses = [server.get("/v1/queues").status for _ in range(8)]
    assert statuses[:2] == [200, 200]
    assert 429 in statuses
    limited = next(a for _ in range(8) if (a := server.get("/v1/queues")).status == 429)
    assert int(limited.headers["retry-after"]) >= 1


def test_ids_of_requests(start: Any) -> None:
    server = start("--log-format", "json")
    sane = server.get("/health", headers={"X-Request-ID": "trace-1:2/3"})
    assert sane.headers["x-request-id"] == "trace-1:2/3"
    odd = server.get("/health", headers={"X-Request-ID": "a b\tc"})
    assert odd.headers["x-request-id"] not in ("", "a b\tc")
    line = eventually(
        lambda: next((x for x in server.output.splitlines() if "trace-1" in x), ""), "its line"
    )
    assert json.loads(line)["request_id"] == "trace-1:2/3"
    assert dt.datetime.fromisoformat(json.loads(line)["time"]).utcoffset() is not None
    serving = json.loads(server.output.splitlines()[0])
    assert (serving["level"], serving["logger"]) == ("INFO", "tidemill.server")


# -- a worker beside ------------------------------------------------------------------------------


@pytest.mark.everyday
def test_server_and_worker_in_one_command(start: Any, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from tidemill import Tidemill\n"
        f"mill = Tidemill('lmdb://{tmp_path}/jobs')\n"
        "@mill.task\n"
        "def double(n): return 2 * n\n"
    )
    app = f"{tmp_path}/shop.py:mill"
    server = start("--workers", app, "-p", "1", "-c", "2", where=app)
    job = server.post("/v1/jobs", {"task": "shop.double", "args": [21]}).json["id"]
    result = server.get(f"/v1/jobs/{job}/result?wait=60", timeout=70)
    assert (result.status, result.json["result"]) == (200, 42)
    bad = server.post("/v1/jobs", {"task": "shop.double", "args": [1, 2, 3]})
    assert bad.status == 400
    assert "; task shop.double takes (" in bad.json["detail"]
    # it ends with the server
    family = psutil.Process(server.pid).children(recursive=True)
    assert family
    assert server.end() == 0
    assert not [child for child in family if alive(child.pid)]


def test_the_worker_ends_when_the_server_is_killed(start: Any, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        f"from tidemill import Tidemill\nmill = Tidemill('lmdb://{tmp_path}/jobs')\n"
    )
    app = f"{tmp_path}/shop.py:mill"
    server = start("--workers", app, "-p", "1", where=app)
    eventually(lambda: "worker" in server.output, "the worker")
    family = psutil.Process(server.pid).children(recursive=True)
    server.process.kill()
    eventually(lambda: not [child for child in family if alive(child.pid)], "the worker's end")
