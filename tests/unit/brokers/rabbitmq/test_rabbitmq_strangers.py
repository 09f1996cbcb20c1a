"""``amqp://`` on a port of another kind of server ends with one sentence."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import threading
import warnings
from collections.abc import Iterator

import pytest

from tidemill.brokers.rabbitmq import settings
from tidemill.brokers.registry import open_broker
from tidemill.errors import BrokerUnavailable

ANSWERS = {
    "nothing": b"",
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "redis": b"-ERR unknown command 'AMQP'\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
}


@contextlib.contextmanager
def stranger(answer: bytes, *, hangs_up: bool) -> Iterator[str]:
    """A server that answers whatever it is asked with the same; yields its URL."""
    listener, calls = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                call, _ = listener.accept()
                calls.append(call)
                call.recv(100)
                call.sendall(answer)
                if hangs_up:
                    call.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"amqp://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        for call in calls:
            call.close()


@pytest.mark.parametrize("patience", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("who", ANSWERS)
def test_a_server_that_is_no_rabbitmq_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, who: str, patience: float
) -> None:
    # given: pika's own patience ends before ours, with it, or while we hang up
    monkeypatch.setattr(settings, "CONNECT_TIMEOUT", 0.5)
    caplog.set_level(logging.INFO, "tidemill.rabbitmq")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        with stranger(ANSWERS[who], hangs_up=who == "http") as url:
            # when
            with pytest.raises(BrokerUnavailable, match=r"rabbitmq at 127\.0\.0\.1") as refusal:
                open_broker(f"{url}?patience={patience}")
            gc.collect()
    # then
    assert "\n" not in str(refusal.value)
    assert caplog.text == ""
    assert [str(one.message) for one in seen if one.category is ResourceWarning] == []
