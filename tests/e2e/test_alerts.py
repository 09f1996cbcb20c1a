"""Alerts: sent once when they begin and once when they end, to a real webhook or command."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_store import Desk
from harness import eventually
from moved_clock import MovedClock
from servers.base import free_port
from servers.http import JobServer

from tidemill import InvalidOption, Tidemill
from tidemill.alerts.measure import measure
from tidemill.alerts.rules import Rule, Rules, Target, read_rules
from tidemill.alerts.send import Message, SendFailed, send
from tidemill.alerts.state import alerts
from tidemill.alerts.watch import Watch
from tidemill.core.job import Owner
from tidemill.errors import FeatureMissing

LONELY = Rule(name="lonely", when="no-worker")
MESSAGE = Message(
    **dict.fromkeys(("event", "text", "rule", "when", "queue", "store", "host"), "x"),
    **dict.fromkeys(("value", "above", "began", "at"), 1.0),
)


class Receiver:
    """A webhook on a port of its own; ``got`` has the messages."""

    def __init__(self, port: int = 0, status: int = 204, location: str = "") -> None:
        self.got: queue.Queue[Any] = queue.Queue()
        self.hang = threading.Event()
        self.hang.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.hang.wait(60)
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                got = json.loads(body or "{}") | {"token": self.headers["Authorization"]}
                receiver.got.put(got)
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.end_headers()

            do_GET = do_HEAD = do_POST

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def next(self) -> Any:
        return self.got.get(timeout=60)

    def close(self) -> None:
        self.hang.set()
        self.server.shutdown()
        self.thread.join(60)
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@contextlib.contextmanager
def watching(
    mill: Tidemill, url: str, *rules: Rule, remind: float = 0.0, timeout: float = 10.0
) -> Iterator[Watch]:
    target = Target(webhook=url, tries=1, timeout=timeout)
    watch = Watch(mill, Rules(rules or (LONELY,), target, every=0.02, remind=remind))
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


def write_rules(folder: Path, url: str) -> str:
    path = folder / "alerts.toml"
    path.write_text(
        f'every = 1\n[send]\nwebhook = "{url}"\ntries = 1\n'
        'headers = {Authorization = "Bearer $KEY"}\n'
        '[[rule]]\nname = "lonely"\nwhen = "no-worker"\n'
    )
    return str(path)


@pytest.mark.everyday
def test_an_alert_is_told_once_when_it_begins_and_once_when_it_ends(
    desk: Desk, receiver: Receiver
) -> None:
    # given a queue with a job and no worker
    desk.add.enqueue(1)
    with watching(desk.mill, receiver.url):
        began = receiver.next()
        assert (began["event"], began["rule"], began["queue"]) == ("begin", "lonely", "sums")
        assert began["text"] == "lonely: queue sums has 1 ready job and no worker"
        eventually(lambda: [a.told for a in alerts(desk.mill).values()] == ["begin"], "noted")
    # when the watch starts again, and then a worker comes
    with watching(desk.mill, receiver.url):
        desk.mill.broker.attach(Owner(id="w", name="w", queues=("sums",), concurrency=1))
        # then the next message is the end
        ended = receiver.next()
        assert (ended["event"], ended["began"]) == ("end", began["began"])
        assert ended["text"].startswith("over: lonely: ")
        eventually(lambda: not alerts(desk.mill), "the note is gone")
    assert receiver.got.empty()


def test_an_alert_that_lasts_is_told_again(desk: Desk, receiver: Receiver) -> None:
    desk.add.enqueue(1)
    with watching(desk.mill, receiver.url, remind=0.1):
        assert [receiver.next()["event"] for _ in range(3)] == ["begin", "reminder", "reminder"]


def test_an_alert_begins_only_when_it_lasts(desk: Desk, receiver: Receiver) -> None:
    desk.add.enqueue(1)
    slow = Rule(name="slow", when="no-worker", lasting=3600)
    with watching(desk.mill, receiver.url, slow, LONELY):
        assert receiver.next()["rule"] == "lonely"
        assert {alert.rule for alert in alerts(desk.mill).values()} == {"lonely"}


def test_a_webhook_that_is_away_is_told_later(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tidemill.alerts")
    desk.add.enqueue(1)
    port = free_port()
    with watching(desk.mill, f"http://127.0.0.1:{port}/hook"):
        eventually(lambda: "Connection refused" in caplog.text, "the log says that it is away")
        receiver = Receiver(port)
        try:
            assert receiver.next()["event"] == "begin"
        finally:
            receiver.close()


def test_a_webhook_that_refuses_is_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tidemill.alerts")
    desk.add.enqueue(1)
    receiver = Receiver(status=503)
    try:
        with watching(desk.mill, receiver.url):
            said = "the alert 'lonely' cannot be sent: the webhook answered 503"
            eventually(lambda: said in caplog.text, "the log says so")
    finally:
        receiver.close()


@pytest.mark.everyday("302")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_of_a_webhook_is_not_followed(status: int, receiver: Receiver) -> None:
    # case S12
    """Case M12: the headers may hold a password, which is for no other host."""
    # given a webhook that redirects to another host
    moved = Receiver(status=status, location=receiver.url)
    headers = {"Authorization": "Bearer secret"}
    target = Target(webhook=moved.url, headers=headers, tries=1)
    try:
        # when a message is sent, then it counts as not sent, and the error says what to do
        with pytest.raises(SendFailed, match=f"answered {status} .*; write the address that"):
            send(target, MESSAGE, threading.Event())
    finally:
        moved.close()
    assert receiver.got.empty()


def test_a_webhook_that_hangs_keeps_nobody_from_measuring(desk: Desk, receiver: Receiver) -> None:
    receiver.hang.clear()
    desk.add.enqueue(1)
    with watching(desk.mill, receiver.url, timeout=0.5):
        eventually(lambda: len(alerts(desk.mill)) == 1, "the first alert is on")
        desk.bad.enqueue("x")
        eventually(lambda: len(alerts(desk.mill)) == 2, "the second alert is on")
        receiver.hang.set()
        told = set[str]()
        while told != {"sums", "default"}:
            told.add(receiver.next()["queue"])


def test_a_command_is_told_without_a_shell(desk: Desk, tmp_path: Path) -> None:
    # given a command that writes down what it is told
    out = tmp_path / "told"
    code = (
        "import json, os, sys; message = json.load(sys.stdin); "
        "open(sys.argv[1], 'w').write(os.environ['TIDEMILL_ALERT_EVENT'] + ' ' + message['queue'])"
    )
    desk.add.enqueue(1)
    target = Target(command=(sys.executable, "-c", code, f"{out}; echo $HOME"))
    watch = Watch(desk.mill, Rules((LONELY,), target, every=0.02))
    watch.start()
    try:
        told = Path(f"{out}; echo $HOME")
        eventually(lambda: told.exists() and told.read_text() == "begin sums", "it was told")
    finally:
        watch.close()


def test_a_command_may_leave_a_child_that_keeps_its_descriptors(tmp_path: Path) -> None:
    # case M13
    sent, child = tmp_path / "sent", tmp_path / "child"
    script = f"echo told >> {sent}; sleep 600 & echo $! > {child}"
    try:
        send(Target(command=("sh", "-c", script), timeout=5, tries=2), MESSAGE, threading.Event())
        assert sent.read_text() == "told\n"
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


def test_a_command_that_fails_is_named_with_its_last_line() -> None:
    target = Target(command=("sh", "-c", "echo first >&2; echo last >&2; exit 3"), tries=1)
    with pytest.raises(SendFailed, match=r"^the command ended with 3: last$"):
        send(target, MESSAGE, threading.Event())


def values(mill: Tidemill, **rule: Any) -> dict[str, float]:
    (one, *_) = found = measure(mill, [Rule(name="r", **rule)])
    assert one.text
    return {value.queue: value.value for value in found}


def test_each_kind_of_rule_measures_its_value(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, moved_clock: MovedClock
) -> None:
    for n in range(3):
        desk.add.enqueue(n)
    assert values(desk.mill, when="depth") == {"sums": 3}
    assert values(desk.mill, when="no-worker") == {"sums": 3}
    assert 0 <= values(desk.mill, when="oldest")["sums"] < 60
    moved_clock.set_wall(1000)
    assert 999 < values(desk.mill, when="oldest")["sums"] < 1060
    desk.mill.broker.set_queue("sums", paused=True)
    assert values(desk.mill, when="oldest") == {"sums": 0}
    disk: Any = SimpleNamespace(free=20, total=100, used=70)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    assert values(desk.mill, when="disk")[""] == pytest.approx(0.8)


def test_the_part_of_failures(desk: Desk) -> None:
    # given 1 failure and 3 successes, run by a real worker
    for n in range(3):
        desk.add.using(queue="default").enqueue(n)
    desk.bad.using(retries=0).enqueue("x")
    desk.work()
    assert values(desk.mill, when="failures", at_least=4) == {"default": 0.25}
    assert values(desk.mill, when="failures", at_least=5) == {"default": 0}


def test_a_store_that_does_not_tell_its_disk(receiver: Receiver) -> None:
    with Tidemill("memory://") as mill, pytest.raises(FeatureMissing, match="how full its disk is"):
        Watch(mill, Rules((Rule(name="d", when="disk", above=0.8),), Target(webhook=receiver.url)))


SEND = '[send]\nwebhook = "http://localhost/x"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", "is not TOML"),
        (SEND, "required field `rule`"),
        ('[[rule]]\nname = "a"\nwhen = "no-worker"', "required field `send`"),
        (SEND + '[[rule]]\nwhen = "depth"', "required field `name` - at `$.rule[0]`"),
        (SEND + '[[rule]]\nname = "a"\nwhen = "dept"\n', "rules can measure oldest, depth"),
        (SEND + '[[rule]]\nname = "a"\nwhen = "depth"\n', "rule 'a' needs above"),
        (SEND + '[[rule]]\nname = "a"\nwhen = "depth"\nabove = "x"', "`$.rule[0].above`"),
        (
            SEND + '[[rule]]\nname = "a"\nwhen = "failures"\nabove = 2',
            "above must be at least 0 and less than 1",
        ),
        (
            SEND + '[[rule]]\nname = "a"\nwhen = "depth"\nabove = 1\nqeue = "x"',
            "unknown field `qeue`",
        ),
        (SEND + 'user = "x"\n[[rule]]\nname = "a"\nwhen = "no-worker"', "unknown field `user`"),
        ("every = 0\n" + SEND + '[[rule]]\nname = "a"\nwhen = "no-worker"', "`$.every`"),
        (
            '[send]\nwebhook = "ftp://x"\n[[rule]]\nname = "a"\nwhen = "no-worker"',
            "`$.send.webhook`",
        ),
        (
            SEND + 'headers = {A = "$NO_SUCH"}\n[[rule]]\nname = "a"\nwhen = "no-worker"',
            "no variable NO_SUCH",
        ),
        (SEND + '[[rule]]\nname = "a"\nwhen = "no-worker"\n' * 2, "two rules have the name 'a'"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text(text)
    with pytest.raises(InvalidOption) as caught:
        read_rules(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.everyday
def test_the_verbs(
    desk: Desk, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "secret")
    rules = write_rules(tmp_path, receiver.url)
    # a test is sent at once
    result = desk.run("alerts", "test", rules, url=False)
    assert result.output == f"sent a test alert to {receiver.url}\n"
    sent = receiver.next()
    assert (sent["event"], sent["token"]) == ("test", "Bearer secret")
    # a watch runs until TERM
    desk.add.enqueue(1)
    assert desk.run("alerts", "list").stdout == "no alert is on\n"
    words = [sys.executable, "-m", "tidemill", "alerts", "run", rules, "--url", desk.url]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert receiver.next()["event"] == "begin"
        process.send_signal(signal.SIGTERM)
        assert "alert: queue sums has 1 ready job and no worker" in process.stderr.read()
        assert process.wait(60) == 0
    (listed,) = desk.json("alerts", "list")["alerts"]
    assert (listed["rule"], listed["queue"]) == ("lonely", "sums")
    assert "no worker" in desk.run("alerts", "list").stdout


def test_a_test_that_does_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "x")
    desk = Desk(tmp_path)
    url = f"http://127.0.0.1:{free_port()}/hook"
    result = desk.run("alerts", "test", write_rules(tmp_path, url), url=False)
    assert result.exit_code == 1
    assert f"the test alert did not reach {url}: the webhook does not answer" in result.output
    desk.close()


def test_a_server_watches_its_store(
    desk: Desk, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "x")
    desk.add.enqueue(1)
    server = JobServer("--alerts", write_rules(tmp_path, receiver.url), where=desk.url)
    try:
        assert receiver.next()["event"] == "begin"
    finally:
        server.close()


def test_an_answer_that_is_not_http_is_logged_and_sent_again(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "tidemill.alerts")
    desk.add.enqueue(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with watching(desk.mill, f"http://127.0.0.1:{port}/hook"):
            for _ in range(2):  # the second try shows that the thread lives
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"SSH-2.0-odd\r\n\r\n")
            eventually(lambda: "does not answer in HTTP" in caplog.text, "the log says so")


def test_a_secret_with_a_line_break_is_not_logged() -> None:
    headers = {"Authorization": "Bearer SECRET\n"}
    target = Target(webhook="http://127.0.0.1:1/", headers=headers, tries=1)
    with pytest.raises(SendFailed) as caught:
        send(target, MESSAGE, threading.Event())
    assert "SECRET" not in str(caught.value)
    assert "header" in str(caught.value)
