"""``tidemill server``: a real process on a store of its own, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .base import Server


class Answer(NamedTuple):
    """What came back: status, headers by lower-case name, bytes."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        """The document."""
        return json.loads(self.data)


class InHand:
    """A request that the server has begun to work on: it has asked for the body."""

    def __init__(self, port: int, method: str, path: str, body: bytes) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), 60)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        self._sock.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        self.body = body
        said = b""
        while not said.endswith(b"\r\n\r\n"):
            part = self._sock.recv(1)
            assert part, said
            said += part
        assert said.startswith(b"HTTP/1.1 100"), said

    def send(self, body: bytes | None = None) -> None:
        """Send the body, or a part of it."""
        self._sock.sendall(self.body if body is None else body)

    def close(self) -> None:
        """Go away."""
        self._sock.close()

    def answer(self) -> Answer:
        """Wait for it."""
        with self._sock:
            response = http.client.HTTPResponse(self._sock)
            response.begin()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())


class JobServer(Server):
    """One server. ``where`` is its app or URL, LMDB in its own folder when not given."""

    patience = 120.0

    def __init__(self, *options: str, where: str = "", env: dict[str, str] | None = None) -> None:
        super().__init__("server")
        self.options = options
        self.where = where or f"lmdb://{self.path}/store"
        self.env = env or {}
        self.token = ""
        self.start()

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, again after a kill: on the same port and store."""
        command = [sys.executable, "-m", "tidemill", "server", self.where]
        command += ["--port", str(self.port), *self.options]
        self.launch(command, self._answers)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0):
                return True
        except OSError:
            return False

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Ask it to end, and wait; its exit code."""
        process = self.process
        self.stop(signum)
        return int(process.returncode)

    @property
    def output(self) -> str:
        """What it wrote."""
        return self.log.read_text(errors="replace")

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = 120.0,
    ) -> Answer:
        """One request on a connection of its own; ``body`` is bytes, or sent as JSON."""
        given = dict(headers or {})
        if self.token:
            given.setdefault("Authorization", f"Bearer {self.token}")
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            given.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, given)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def reserve(self, *queues: str, **more: Any) -> list[dict[str, Any]]:
        """Messages of these queues."""
        answer = self.post("/v1/reserve", {"queues": list(queues), **more})
        assert answer.status == 200, answer
        jobs: list[dict[str, Any]] = answer.json["jobs"]
        return jobs

    def begin(self, method: str, path: str, body: Any = None) -> InHand:
        """A request that the server waits for the body of."""
        data = b"" if body is None else json.dumps(body).encode()
        return InHand(self.port, method, path, data)

    @contextlib.contextmanager
    def stream(self, path: str, timeout: float = 30.0) -> Iterator[Iterator[tuple[str, Any]]]:
        """Server-sent events as they come: name and data; what only keeps alive is left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}

        def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
            name = ""
            while line := response.readline().decode().rstrip("\n"):
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    response.readline()
                    yield name, json.loads(line[6:])
                else:
                    response.readline()

        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            yield events(response)
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Answer:
        """GET."""
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        """POST."""
        return self.request("POST", path, body, **options)

    def put(self, path: str, body: Any = None, **options: Any) -> Answer:
        """PUT."""
        return self.request("PUT", path, body, **options)

    def delete(self, path: str, **options: Any) -> Answer:
        """DELETE."""
        return self.request("DELETE", path, **options)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """The files of a certificate for this machine and of its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", str(key), "-out", str(cert), "-days", "1"),
            *("-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key
