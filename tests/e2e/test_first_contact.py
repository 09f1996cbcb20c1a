"""The first minute: a server that is not there yet, and mistakes that get one sentence each."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Postgres, RabbitMQ, Redis
from servers.http import JobServer
from test_cli_worker import worker

from tidemill import Tidemill
from tidemill.errors import BrokerUnavailable

PATIENCE = 120.0


class ClosedDoor:
    """Stands at a server's port before the server: it closes each connection at once."""

    def __init__(self, port: int) -> None:
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sock.bind(("127.0.0.1", port))
        self._sock.listen()
        self._sock.settimeout(PATIENCE)

    def turn_one_away(self) -> None:
        """Wait for a client, reset its connection, and leave."""
        client, _ = self._sock.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        self._sock.close()


def _redis() -> tuple[Any, str]:
    server = Redis()
    return server, server.url


def _postgres() -> tuple[Any, str]:
    server = Postgres()
    Tidemill(f"{server.url()}?migrate=1").broker.close()
    return server, server.url()


def _rabbitmq() -> tuple[Any, str]:
    server = RabbitMQ()
    return server, server.url


def _http() -> tuple[Any, str]:
    server = JobServer("--quiet")
    return server, server.url


@pytest.fixture(params=[_redis, _postgres, _rabbitmq, _http], ids=lambda f: f.__name__[1:])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """A server that is not running, and its URL."""
    make: Callable[[], tuple[Any, str]] = request.param
    server, url = make()
    server.kill()
    yield server, url
    server.close()


def test_a_producer_waits_for_a_server_that_starts_after_it(server: tuple[Any, str]) -> None:
    # given a producer whose first connection is turned away
    machine, url = server
    door = ClosedDoor(machine.port)
    mill, ids = Tidemill(f"{url}?patience={PATIENCE:g}"), list[str]()
    producer = threading.Thread(target=lambda: ids.append(mill.queue("first").put(1).id))
    producer.start()
    door.turn_one_away()
    # when the server starts
    machine.start()
    # then the first put succeeds
    producer.join(PATIENCE)
    assert len(ids) == 1
    mill.close()


def test_after_its_patience_a_producer_gets_one_sentence(server: tuple[Any, str]) -> None:
    machine, url = server
    with (
        Tidemill(f"{url}?patience=0.5") as mill,
        pytest.raises(BrokerUnavailable, match=rf"127\.0\.0\.1:{machine.port}.*"),
    ):
        mill.queue("first").put(1)


def test_a_worker_waits_for_a_server_that_starts_after_it(tmp_path: Path) -> None:
    machine = Redis()
    machine.kill()
    door = ClosedDoor(machine.port)
    (tmp_path / "early_app.py").write_text(
        f"from tidemill import Tidemill\nmill = Tidemill('{machine.url}?patience={PATIENCE:g}')\n"
        "@mill.task(name='say')\ndef say(): return 'here'\n"
    )
    with worker(tmp_path, "early_app:mill", "-p", "1") as process:
        door.turn_one_away()
        machine.start()
        with Tidemill(machine.url) as mill:
            mill.task(name="say")(max)
            assert mill.enqueue(mill.call("say").using(queue="default")).result(PATIENCE) == "here"
        process.terminate()
        assert process.wait(PATIENCE) == 0
    machine.close()


NO_STORE = "mill = Tidemill('redis://127.0.0.1:1/0?patience=0')\n"
SAID = {
    "no_tasks": ("mill = Tidemill('lmdb://./jobs')\n", 0, "declares no task; import the modules"),
    "no_variable": ("mill = Tidemill('lmdb://./jobs')\n", 2, "did you mean 'mill'?"),
    "no_server": (NO_STORE, 3, "cannot reach redis at 127.0.0.1:1: "),
    "no_postgres": (
        "mill = Tidemill('postgresql://127.0.0.1:1/shop?patience=0')\n",
        *(3, "cannot reach PostgreSQL at 127.0.0.1:1, database shop: "),
    ),
    "no_rabbitmq": (
        "mill = Tidemill('amqp://127.0.0.1:1?patience=1')\n",
        3,
        "cannot reach rabbitmq",
    ),
    "no_job_server": ("mill = Tidemill('http://127.0.0.1:1?patience=0')\n", 3, "the job server at"),
    "in_memory": ("mill = Tidemill('memory://')\n", 2, "run the worker in the program"),
    "at_import": (NO_STORE + "mill.queue('q', max_size=5)\n", 3, "cannot reach redis at 127.0.0.1"),
    "no_driver": ("mill = Tidemill('redis://h')\n", 2, "install it: pip install 'tidemill[redis]'"),
    "no_scheme": ("mill = Tidemill('redsi://h')\n", 2, "no broker for redsi://"),
    "no_folder": ("mill = Tidemill('lmdb:///proc/no/jobs')\n", 3, "cannot use /proc/no/jobs as a"),
}


@pytest.mark.parametrize("case", SAID)
def test_a_workers_start_ends_with_one_sentence(case: str, tmp_path: Path) -> None:
    app, code, sentence = SAID[case]
    task = "" if case == "no_tasks" else "mill.task(name='t')(max)\n"
    (tmp_path / "first_app.py").write_text(f"from tidemill import Tidemill\n{app}{task}")
    if case == "no_driver":
        (tmp_path / "hiredis.py").write_text("raise ModuleNotFoundError(name='hiredis')\n")
    name = "first_app:nill" if case == "no_variable" else "first_app:mill"
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", "worker", name, "-p", "1", "--burst", "-q"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert "ended right after its start" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if " INFO " not in line]
    where = 'File "' in done.stderr  # the line of the app, where a url or an option is wrong
    assert len(errors) == 1 or (case == "no_scheme" and where), done.stderr


def test_the_apps_own_error_begins_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "first_app.py").write_text(
        "from tidemill import Tidemill\nmill = Tidemill('lmdb://./jobs')\n1 / 0\n"
    )
    with worker(tmp_path, "first_app:mill", "-p", "1") as process:
        assert process.wait(PATIENCE) == 2
        lines = process.stderr.read().splitlines()
    assert "cannot be imported: ZeroDivisionError: division by zero" in lines[0]
    assert lines[1] == f'  File "{tmp_path}/first_app.py", line 3, in <module>'
