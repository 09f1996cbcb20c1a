"""The TLS listener goes on after an error of accept(2), whatever the error is."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from tidemill.server.http import tls
from tidemill.server.http.tls import TlsListener, tls_context
from tidemill.server.settings import Settings


class Faulty(socket.socket):
    """A listening socket whose first calls of accept(2) raise."""

    faults: list[Exception]

    def accept(self) -> tuple[socket.socket, object]:
        if self.faults:
            raise self.faults.pop()
        return super().accept()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", str(key), "-out", str(cert), "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return Settings(tls_cert=str(cert), tls_key=str(key))


async def is_served(settings: Settings, fault: Exception) -> bool:
    """Whether a client agrees on TLS with a listener whose first accept(2) raises."""
    context = tls_context(settings)
    assert context is not None
    with Faulty() as sock:
        sock.faults = [fault]
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        listener = TlsListener(sock, context, asyncio.Protocol, (), settings)
        task = asyncio.create_task(listener.run())
        try:
            async with asyncio.timeout(20):
                _, writer = await asyncio.open_connection(
                    *sock.getsockname(),
                    ssl=ssl.create_default_context(cafile=settings.tls_cert),
                    server_hostname="localhost",
                )
            writer.close()
            return not task.done()
        except TimeoutError:
            return False
        finally:
            task.cancel()


def test_an_aborted_connection_holds_up_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "NO_DESCRIPTORS", 3600.0)
    fault = OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
    assert asyncio.run(is_served(settings, fault))


@pytest.mark.parametrize("fault", [OSError(errno.EMFILE, "no"), RuntimeError("unforeseen")])
def test_any_error_is_logged_and_the_listener_goes_on(
    settings: Settings,
    fault: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tls, "NO_DESCRIPTORS", 0.01)
    assert asyncio.run(is_served(settings, fault))
    (record,) = [it for it in caplog.records if it.name == "tidemill.server"]
    assert record.getMessage().startswith("a connection cannot be accepted")
