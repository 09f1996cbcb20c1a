"""Private servers for tests: from the binaries on the path, on random ports of 127.0.0.1.

Each may be killed and started again on the same port and data in the middle of a test. A server
that is missing is a failure on CI (``CI=true``) and one sentence elsewhere. To run what does not
kill its server against one of your own, set ``TIDEMILL_TEST_REDIS`` or ``TIDEMILL_TEST_POSTGRES``
to its URL; each test uses a prefix or a schema of its own there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

__all__ = [
    "NETWORK",
    "PgBouncer",
    "Postgres",
    "Proxy",
    "Redis",
    "Server",
    "free_port",
    "postgres_url",
    "redis_url",
]

PATIENCE = 20.0
"""Seconds a server has to start."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def program(name: str, package: str) -> str:
    """The path of a server's binary, or the end of the test with what to install."""
    path = shutil.which(name)
    if path:
        return path
    sentence = f"{name} is not installed; on Debian: apt-get install {package}"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


def language(folder: Path) -> dict[str, str]:
    """An environment in which text sorts as Americans sort it, not by its bytes."""
    definition = Path("/usr/share/i18n/locales/en_US")
    if not definition.exists():
        definition = Path(program(str(definition), "locales"))
    tool = program("localedef", "libc-bin")
    command = [tool, "-i", str(definition), "-f", "UTF-8", str(folder / "en_US.UTF-8")]
    subprocess.run(command, check=True, capture_output=True)
    return {"LOCPATH": str(folder), "LC_ALL": "en_US.UTF-8"}


def _dying_with_us() -> list[str]:
    """What to put before a command so that it ends with this process, however that ends (Linux)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


class Server:
    """One server process, its folder and its port."""

    def __init__(self, kind: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"tidemill-test-{kind}-"))
        self.port = free_port()
        self.log = self.path / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.env: dict[str, str] = {}
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Of the server."""
        assert self.process is not None
        return self.process.pid

    def launch(
        self, command: Sequence[str], answers: Callable[[], bool], user: str | None = None
    ) -> None:
        """Start the process and wait until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*_dying_with_us(), *command],
                cwd=self.path,
                stdout=log,
                stderr=log,
                process_group=0,
                user=user,
                env={**os.environ, **self.env},
            )
        until = time.monotonic() + PATIENCE
        while not answers():
            if self.process.poll() is not None or time.monotonic() > until:
                text = self.log.read_text(errors="replace")[-3000:]
                raise AssertionError(f"{command[0]} did not start:\n{text}")
            time.sleep(0.01)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """End the server, all of its processes at once, and wait until it is dead."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signum)
            except ProcessLookupError:
                pass
            self.process.wait(PATIENCE)
            self.process = None

    def stop(self, signum: int) -> None:
        """Ask the server to end, and wait."""
        if self.process is not None:
            self.process.send_signal(signum)
            self.process.wait(PATIENCE)
            self.process = None

    def close(self) -> None:
        """End it and delete its folder."""
        self.kill()
        shutil.rmtree(self.path, ignore_errors=True)


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
            *("--save", "", "--daemonize", "no"),
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


class Proxy:
    """A line to a server of this machine that can be cut: nothing goes through, nobody is told."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = threading.Event()
        self._open.set()
        self._over = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """From now on bytes are held up."""
        self._open.clear()

    def mend(self) -> None:
        """They go on, those held up first."""
        self._open.set()

    def close(self) -> None:
        """Hang up everything."""
        self._over = True
        self._open.set()
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._open.wait()
                sink.sendall(data)
        except OSError:
            pass
        finally:
            if not self._over:
                self._open.wait()
            for sock in (source, sink):
                sock.close()


class Machine:
    """Another machine: a network namespace with a line of its own to this one, which can be cut.

    It has a host name and a folder for temporary files, too.

    Attributes:
        host: this machine, as seen from there.
        under: what to put before a command that is to run there.
        env: what to add to the environment of such a command.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._space = f"tidemill-{name}-{os.getpid()}"
        self._link = f"tm{secrets.token_hex(4)}"
        subnet = f"10.{random.randrange(64, 256)}.{random.randrange(256)}"
        self.host = f"{subnet}.1"
        ip("netns", "add", self._space)
        atexit.register(self.close)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        ip("addr", "add", f"{self.host}/30", "dev", self._link)
        ip("link", "set", self._link, "up")
        ip("-n", self._space, "addr", "add", f"{subnet}.2/30", "dev", "eth0")
        ip("-n", self._space, "link", "set", "eth0", "up")
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        self.under = [program("ip", "iproute2"), "netns", "exec", self._space, *named]
        folder.mkdir()
        self.env = {"TMPDIR": str(folder)}

    def cut(self) -> None:
        """From now on nothing arrives, and nobody is told."""
        ip("link", "set", self._link, "down")

    def mend(self) -> None:
        """The line is there again."""
        ip("link", "set", self._link, "up")

    def close(self) -> None:
        """Forget it. What runs there is ended first."""
        for command in (["link", "del", self._link], ["netns", "del", self._space]):
            subprocess.run(["ip", *command], capture_output=True, check=False)


def ip(*command: str) -> None:
    """Change something in the network of this machine, or of one that was made here."""
    subprocess.run([program("ip", "iproute2"), *command], check=True, capture_output=True)


def may_have_machines() -> bool:
    """Whether this user may make network namespaces."""
    made = f"tidemill-try-{os.getpid()}"
    command = [program("ip", "iproute2"), "netns", "add", made]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    ip("netns", "del", made)
    return True


class Postgres(Server):
    """A PostgreSQL cluster of its own, with default durability."""

    def __init__(self, *options: str, hosts: Sequence[str] = ()) -> None:
        super().__init__("postgres")
        self.options = options
        self.hosts = ",".join(["127.0.0.1", *hosts])
        self.data = self.path / "data"
        # Its binaries refuse root.
        self.user = _ordinary_user() if os.getuid() == 0 else None
        if self.user:
            shutil.chown(self.path, self.user)
        command = [_postgres_program("initdb"), "-D", str(self.data), "-U", "tidemill"]
        command += ["--auth", "trust", "--no-sync", "--no-instructions", "-E", "UTF8"]
        subprocess.run(
            command, check=True, capture_output=True, cwd=self.path, user=self.user, timeout=120
        )
        with (self.data / "pg_hba.conf").open("a") as rules:
            rules.writelines(f"host all all {host}/30 trust\n" for host in hosts)
        self.start()

    def url(self, database: str = "postgres") -> str:
        """Of a database."""
        return f"postgresql://tidemill@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start it, again after a kill: on the same port and data."""
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        command = [_postgres_program("postgres"), "-D", str(self.data), "-p", str(self.port)]
        command += ["-h", self.hosts, "-k", str(self.path)]
        for option in self.options:
            command += ["-c", option]
        self.launch(command, self._answers, self.user)

    def _answers(self) -> bool:
        ready = [_postgres_program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, check=False).returncode == 0

    def run(self, statement: str, database: str = "postgres") -> str:
        """What psql prints for a statement."""
        command = [_postgres_program("psql"), "-qAtX", self.url(database), "-c", statement]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """End the postmaster and all its backends at once: each leads a session of its own."""
        if self.process is not None:
            listed = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(self.pid)],
                check=False, capture_output=True, text=True,
            )  # fmt: skip
            self.process.send_signal(signum)
            for pid in map(int, listed.stdout.split()):
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    pass
        super().kill(signum)


class PgBouncer(Server):
    """A pooler in transaction mode before a server: what belongs to a session does not last."""

    def __init__(self, server: Postgres) -> None:
        super().__init__("pgbouncer")
        user = _ordinary_user() if os.getuid() == 0 else None
        users = self.path / "users.txt"
        users.write_text('"tidemill" ""\n')
        config = self.path / "pgbouncer.ini"
        config.write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={server.port}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {users}\npool_mode = transaction\n"
            "default_pool_size = 4\n"
        )
        if user:
            shutil.chown(self.path, user)
        found = shutil.which("pgbouncer") or program("/usr/sbin/pgbouncer", "pgbouncer")
        self.launch([found, str(config)], self._answers, user)

    def url(self) -> str:
        """Of the database behind it."""
        return f"postgresql://tidemill@127.0.0.1:{self.port}/postgres"

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True


def _postgres_program(name: str) -> str:
    """On Debian only some of its programs are on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else program(name, "postgresql")


def _ordinary_user() -> str:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise AssertionError("PostgreSQL refuses root, and there is no other user")


def redis_url() -> str:
    """Of the Redis that tests share which do not kill it. It keeps nothing on disk."""
    return os.environ.get("TIDEMILL_TEST_REDIS") or _shared_redis().url


def postgres_url() -> str:
    """Of the PostgreSQL database that tests share which do not kill it."""
    return os.environ.get("TIDEMILL_TEST_POSTGRES") or _shared_postgres().url()


@functools.cache
def _shared_redis() -> Redis:
    return Redis()


@functools.cache
def _shared_postgres() -> Postgres:
    return Postgres("fsync=off")  # nobody kills it, and each test makes a store of its own


NETWORK: dict[str, Callable[[str], str]] = {
    "redis": lambda name: f"{redis_url()}?prefix={name}",
    "postgresql": lambda name: f"{postgres_url()}?schema={name}&migrate=1",
}
"""Brokers over a network: the url of a store of that name on the server that tests share."""
