"""PostgreSQL: a primary and an asynchronous standby, each behind a line that can be cut.

Commits wait for the disk of the primary, and not for the standby. When the standby has taken over,
a new standby of it is made, in the old primary's place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import psycopg
from disks import mounted
from excuses import Span, forgets_from
from harness import eventually
from servers import Postgres, Proxy
from servers.postgres import postgres_program

from misfortunes import Misfortune, Rig
from misfortunes.anywhere import CutLine, FullDisk, Stopped

OPTIONS = ("min_wal_size=32MB", "wal_keep_size=128MB", "wal_retrieve_retry_interval=500ms")


class PostgresRig(Rig):
    """A primary and its standby, which change their roles."""

    def __init__(self, chosen: Collection[str] = ()) -> None:
        super().__init__(chosen)
        self._above = self._disk() if self.wants(FullDisk.name) else None
        primary = Postgres(*OPTIONS, above=self._above)
        self.nodes = [primary, Postgres(*OPTIONS, primary=primary, above=self._above)]
        self.callback(lambda: [node.close() for node in self.nodes])
        self.lines = [Proxy(node.port) for node in self.nodes]
        for line in self.lines:
            self.callback(line.close)
        self.servers[:] = self.nodes
        hosts = ",".join(f"127.0.0.1:{line.port}" for line in self.lines)
        session = "target_session_attrs=read-write"
        self.url = f"postgresql://tidemill@{hosts}/postgres?{session}&migrate=1"
        self.misfortunes = [
            LaggingFailover(self),
            Stopped(lambda: self.primary, "the primary"),
            LockedTable(self),
            CutLine(lambda: self.lines[:1]),
            OldBackup(self),
        ]
        if self._above is not None:
            self.misfortunes.append(FullDisk(self._above, self.revive))

    @property
    def primary(self) -> Postgres:
        """The primary of this moment."""
        return self.nodes[0]

    @property
    def standby(self) -> Postgres:
        """The standby of this moment."""
        return self.nodes[1]

    def _disk(self) -> Path:
        """A disk of both servers, which their user can reach."""
        folder = Path(tempfile.mkdtemp(prefix="tidemill-test-disk-"))
        folder.chmod(0o755)
        self.callback(shutil.rmtree, folder, ignore_errors=True)
        return self.enter_context(mounted(folder / "disk", "size=700m"))

    def take_over(self) -> None:
        """Make the standby the primary, and make it a standby in the old primary's place."""
        self.standby.run("SELECT pg_promote()")
        self.nodes.reverse()
        self.lines.reverse()
        self.replace_standby()

    def replace_standby(self) -> None:
        """Make a new standby of the primary."""
        self.standby.close()
        self.nodes[1] = Postgres(*OPTIONS, primary=self.primary, above=self._above)
        self.lines[1].lead_to(self.standby.port)
        self.servers[:] = self.nodes

    def revive(self) -> None:
        """Start what a full disk has ended."""
        for node in self.nodes:
            if node.process is not None and node.process.poll() is not None:
                node.process = None
                node.start()
            eventually(lambda node=node: _runs(node), "the server recovers", pause=0.2)


def _runs(node: Postgres) -> bool:
    try:
        return node.run("SELECT 1") == "1"
    except subprocess.CalledProcessError:
        return False


class LaggingFailover(Misfortune):
    """The standby hears nothing for some seconds, then the primary dies, and the standby follows.

    What the primary answered meanwhile is lost.
    """

    name = "fail-over to a standby that lags"

    def __init__(self, rig: PostgresRig) -> None:
        self._rig = rig

    def strike(self, seconds: float) -> Span:
        """Let the standby lag for some seconds, and fail over to it."""
        rig = self._rig
        began = forgets_from(time.time())
        rig.standby.cut_off(rig.primary)
        time.sleep(seconds)
        rig.primary.kill()
        lost = Span(began, time.time())
        rig.take_over()
        return lost


class LockedTable(Misfortune):
    """Somebody else's transaction holds a lock that every step of a worker needs."""

    name = "a lock on a table"

    def __init__(self, rig: PostgresRig) -> None:
        self._rig = rig
        self._tables = ["lease", "job"]

    def strike(self, seconds: float) -> None:
        """Hold the lock for some seconds."""
        table = self._tables[0]
        self._tables.reverse()
        with psycopg.connect(self._rig.primary.url()) as other:
            other.execute(f"LOCK TABLE tidemill.{table} IN ACCESS EXCLUSIVE MODE")
            time.sleep(seconds)
            other.rollback()


class OldBackup(Misfortune):
    """The primary's disk is lost, and what comes back is a base backup from some seconds before."""

    name = "a restored base backup"

    def __init__(self, rig: PostgresRig) -> None:
        self._rig = rig

    def strike(self, seconds: float) -> Span:
        """Take a base backup, and restore it after some seconds."""
        primary = self._rig.primary
        backup, began = primary.path / "backup", time.time()
        command = [postgres_program("pg_basebackup"), "-D", str(backup), "-U", "tidemill"]
        command += ["-h", "127.0.0.1", "-p", str(primary.port), "-c", "fast", "--no-sync"]
        subprocess.run(
            command, check=True, capture_output=True, cwd=primary.path, user=primary.user
        )
        time.sleep(seconds)
        primary.kill()
        lost = Span(began, time.time())
        shutil.rmtree(primary.data)
        os.rename(backup, primary.data)
        primary.start()
        self._rig.replace_standby()
        return lost
