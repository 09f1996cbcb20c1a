"""PostgreSQL, and a pooler before it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import psycopg

from tidemill.brokers.postgres.schema import _functions, _migrations, migrate
from tidemill.core.clock import new_id

from .base import Server, await_stop, listens, program


class Postgres(Server):
    """A PostgreSQL cluster of its own, with default durability; its folder lies in ``above``.

    With ``primary`` it is a standby of that one.
    """

    def __init__(
        self,
        *options: str,
        hosts: Sequence[str] = (),
        above: Path | None = None,
        primary: Postgres | None = None,
    ) -> None:
        super().__init__("postgres", above)
        self.options = options
        self.hosts = ",".join(["127.0.0.1", *hosts])
        self.data = self.path / "data"
        # Its binaries refuse root.
        self.user = _ordinary_user() if os.getuid() == 0 else None
        if self.user:
            shutil.chown(self.path, self.user)
        if primary is not None:
            command = [postgres_program("pg_basebackup"), "-D", str(self.data), "-U", "tidemill"]
            command += ["-h", "127.0.0.1", "-p", str(primary.port), "-R", "-c", "fast", "--no-sync"]
        else:
            command = [postgres_program("initdb"), "-D", str(self.data), "-U", "tidemill"]
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
        command = [postgres_program("postgres"), "-D", str(self.data), "-p", str(self.port)]
        command += ["-h", self.hosts, "-k", str(self.path)]
        for option in self.options:
            command += ["-c", option]
        self.launch(command, self._answers, self.user)

    def _answers(self) -> bool:
        ready = [postgres_program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, check=False).returncode == 0

    def run(self, statement: str, database: str = "postgres") -> str:
        """What psql prints for a statement."""
        command = [postgres_program("psql"), "-qAtX", self.url(database), "-c", statement]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def cut_off(self, primary: Postgres) -> None:
        """As a standby: hear nothing more of its primary. What that has sent is kept."""
        wal = primary.run("SELECT pg_current_wal_lsn()")
        self._await(f"SELECT pg_last_wal_replay_lsn() >= '{wal}'", "t")
        self.run("ALTER SYSTEM SET primary_conninfo = ''")
        self.run("SELECT pg_reload_conf()")
        primary._await("SELECT count(*) FROM pg_stat_replication", "0")

    def _await(self, statement: str, answer: str) -> None:
        until = time.monotonic() + self.patience
        while self.run(statement) != answer:
            assert time.monotonic() < until, f"{statement} is not {answer}"
            time.sleep(0.05)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """For the time of a block the postmaster and its backends run on and answer nobody."""
        postmaster = psutil.Process(self.pid)
        postmaster.suspend()  # first, so that it starts no backend meanwhile
        stopped = [postmaster, *postmaster.children()]
        try:
            for process in stopped[1:]:
                process.suspend()
            for process in stopped:
                await_stop(process.pid)
            yield
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """End the postmaster and all its backends at once: each leads a session of its own."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)  # so that it starts no other meanwhile
            backends = psutil.Process(self.pid).children()
            self.process.send_signal(signum)
            for backend in backends:
                with contextlib.suppress(psutil.NoSuchProcess):
                    backend.send_signal(signum)
            self.process.send_signal(signal.SIGCONT)
            psutil.wait_procs(backends, self.patience)  # none may hold the memory that they share
        super().kill(signum)

    def close(self) -> None:
        """End it and delete its folder. A killed server would leave its shared memory behind."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop(signal.SIGQUIT)
        super().close()


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
        self.launch([found, str(config)], lambda: listens(self.port), user)

    def url(self) -> str:
        """Of the database behind it."""
        return f"postgresql://tidemill@127.0.0.1:{self.port}/postgres"


def postgres_url() -> str:
    """Of the PostgreSQL database that tests share which do not kill it."""
    return os.environ.get("TIDEMILL_TEST_POSTGRES") or _shared_postgres().url()


@functools.cache
def _shared_postgres() -> Postgres:
    # Nobody kills it, and each test makes a store of its own.
    return Postgres("fsync=off", "max_connections=400")


def postgres_store(name: str) -> str:
    """The URL of a new store in a database of that name, on the server that tests share.

    The database is a copy of one with a migrated schema. A migration takes ten times as long, and a
    copy that is not of files takes twice as long.
    Options of the URL may follow the name: ``name&patience=3``.
    """
    database, _, options = name.partition("&")
    template = _template()
    with psycopg.connect(postgres_url(), autocommit=True) as conn:
        if (
            conn.execute("SELECT FROM pg_database WHERE datname = %s", [database]).fetchone()
            is None
        ):
            copied = " STRATEGY file_copy" if conn.info.server_version >= 150_000 else ""
            conn.execute(f'CREATE DATABASE "{database}" TEMPLATE "{template}"{copied}'.encode())
            _databases.append(database)
            with psycopg.connect(_at(database)) as copy:  # two stores never have the same id
                copy.execute("UPDATE tidemill.meta SET store = %s", [new_id()])
    more = f"&{options}" if options else ""
    return f"{_at(database)}?schema=tidemill&migrate=1{more}"


@contextlib.contextmanager
def postgres_for_a_while() -> Iterator[None]:
    """Drop the databases afterwards that were made within the block."""
    before = len(_databases)
    yield
    if len(_databases) > before:
        with psycopg.connect(postgres_url(), autocommit=True) as conn:
            while len(_databases) > before:
                name = _databases.pop()
                conn.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())


_databases: list[str] = []


def _at(database: str) -> str:
    return urllib.parse.urlsplit(postgres_url())._replace(path=f"/{database}").geturl()


@functools.cache
def _template() -> str:
    """A database with a migrated schema, made once for all processes and this very code."""
    with psycopg.connect(postgres_url(), autocommit=True) as conn:
        code = "\0".join([*_migrations(), _functions()[1]])
        name = f"tidemill_{hashlib.sha256(code.encode()).hexdigest()[:16]}"
        conn.execute("SELECT pg_advisory_lock(hashtext(%s))", [name])
        if conn.execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
            draft = f"{name}_draft"
            conn.execute(f'DROP DATABASE IF EXISTS "{draft}" WITH (FORCE)'.encode())
            conn.execute(f'CREATE DATABASE "{draft}"'.encode())
            with psycopg.connect(_at(draft), autocommit=True) as target:
                migrate(target, "tidemill")
            conn.execute(f'ALTER DATABASE "{draft}" RENAME TO "{name}"'.encode())
    return name


def postgres_program(name: str) -> str:
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
