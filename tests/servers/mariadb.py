"""MariaDB."""

from __future__ import annotations

import functools
import getpass
import os
import subprocess
from pathlib import Path

from .base import Server, listens, program


class MariaDB(Server):
    """A MariaDB server of its own, which believes every user; for tests of ``django://``."""

    def __init__(self, *options: str) -> None:
        super().__init__("mariadb")
        self.options = options
        self.data = self.path / "data"
        install = [program("mariadb-install-db", "mariadb-server"), "--no-defaults"]
        install += [f"--datadir={self.data}", f"--user={getpass.getuser()}", "--skip-test-db"]
        subprocess.run(install, check=True, capture_output=True, cwd=self.path, timeout=120)
        self.start()

    def start(self) -> None:
        """Start it, again after a kill: on the same port and data."""
        found = next(filter(Path.exists, map(Path, _PLACES)), None)
        command = [str(found or program("mariadbd", "mariadb-server")), "--no-defaults"]
        command += [f"--datadir={self.data}", f"--user={getpass.getuser()}", "--skip-grant-tables"]
        command += [f"--port={self.port}", "--bind-address=127.0.0.1", "--skip-networking=0"]
        command += [f"--socket={self.path}/socket", f"--pid-file={self.path}/pid", *self.options]
        self.launch(command, lambda: listens(self.port))

    def url(self) -> str:
        """Of the server."""
        return f"mysql://root@127.0.0.1:{self.port}"


_PLACES = ("/usr/sbin/mariadbd", "/usr/local/sbin/mariadbd")


def mariadb_url() -> str:
    """Of the server that ``TIDEMILL_TEST_MARIADB`` names, else of one that tests share."""
    given = os.environ.get("TIDEMILL_TEST_MARIADB", "")
    return given if given.startswith("mysql:") else _shared_mariadb().url()


@functools.cache
def _shared_mariadb() -> MariaDB:
    # Nobody kills it, and each test makes a store of its own.
    return MariaDB("--innodb-flush-log-at-trx-commit=0", "--max-connections=400")
