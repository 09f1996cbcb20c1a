"""Redis."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from .base import Server, program


class Redis(Server):
    """``redis-server``; with ``durable`` every write is on disk before it is answered."""

    def __init__(
        self,
        *options: str,
        durable: bool = False,
        hosts: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        super().__init__("redis")
        self.env = env or {}
        self.options = [*options]
        if hosts:
            self.options += ["--bind", "127.0.0.1", *hosts, "--protected-mode", "no"]
        if durable:
            self.options += ["--appendonly", "yes", "--appendfsync", "always"]
        self.start()

    @property
    def url(self) -> str:
        """Of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, again after a kill: on the same port and data."""
        command = [
            program("redis-server", "redis-server"),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.path)),
            *("--save", "", "--daemonize", "no", "--repl-diskless-sync-delay", "0"),
            *self.options,
        ]
        self.launch(command, self._answers)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as sock:
                sock.sendall(b"PING\r\n")
                return sock.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def run(self, *command: str) -> str:
        """What redis-cli prints for a command."""
        cli = [program("redis-cli", "redis-tools"), "-p", str(self.port)]
        cli += command
        done = subprocess.run(cli, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def replicate(self) -> None:
        """Wait until a replica has all that was written until now.

        ``WAIT`` over a new connection would wait for nothing: that connection has written nothing.
        """
        written = self._number("master_repl_offset")
        until = time.monotonic() + self.patience
        while written > max(self._numbers(r"slave\d+:.*offset"), default=-1):
            assert time.monotonic() < until, self.run("INFO", "replication")
            time.sleep(0.05)

    def _number(self, name: str) -> int:
        return self._numbers(name)[0]

    def _numbers(self, name: str) -> list[int]:
        return [int(n) for n in re.findall(rf"{name}[:=](\d+)", self.run("INFO", "replication"))]


class Sentinel(Redis):
    """``redis-server --sentinel``, which writes its own configuration, for the master of a port.

    The sentinel takes a master for dead after ``down_after`` seconds of silence, if ``quorum``
    sentinels agree. It gives up a fail-over that makes no progress for ``abort_after`` seconds.
    """

    def __init__(
        self,
        master: int,
        quorum: int = 1,
        down_after: float = 1.0,
        abort_after: float = 3.0,
        options: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        names = "sentinel resolve-hostnames yes\nsentinel announce-hostnames yes\n"
        self.settings = (
            f"{names if host == 'localhost' else ''}"
            f"sentinel monitor mymaster {host} {master} {quorum}\n"
            f"sentinel down-after-milliseconds mymaster {down_after * 1000:.0f}\n"
            f"sentinel failover-timeout mymaster {abort_after * 1000:.0f}\n"
        )
        super().__init__(*options)

    def start(self) -> None:
        """Start it, again after a kill."""
        config = self.path / "sentinel.conf"
        config.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {self.path}\n{self.settings}")
        command = [program("redis-server", "redis-server"), str(config), "--sentinel"]
        self.launch([*command, *self.options], self._answers)


def redis_url() -> str:
    """Of the Redis that tests share which do not kill it. It keeps nothing on disk."""
    return os.environ.get("TIDEMILL_TEST_REDIS") or _shared_redis().url


@functools.cache
def _shared_redis() -> Redis:
    return Redis()


def language(folder: Path) -> dict[str, str]:
    """An environment in which text sorts as Americans sort it, not by its bytes."""
    definition = Path("/usr/share/i18n/locales/en_US")
    if not definition.exists():
        definition = Path(program(str(definition), "locales"))
    tool = program("localedef", "libc-bin")
    command = [tool, "-i", str(definition), "-f", "UTF-8", str(folder / "en_US.UTF-8")]
    subprocess.run(command, check=True, capture_output=True)
    return {"LOCPATH": str(folder), "LC_ALL": "en_US.UTF-8"}
