"""The Django project of the tests, and its commands, as processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SITE = Path(__file__).parent / "site"
SECONDS = 120.0


class Project:
    """The project, with its data in a folder and settings by the environment."""

    def __init__(self, data: Path, **settings: str) -> None:
        own = ("DJANGO_SETTINGS_MODULE", "TIDEMILL_URL", "TIDEMILL_APP", "PYTHONDONTWRITEBYTECODE")
        clean = {name: value for name, value in os.environ.items() if name not in own}
        self.environment = {**clean, "SITE_DATA": str(data), **settings}
        self.url = settings.get("SITE_STORE", f"lmdb://{data}/.tidemill")
        self.manage("migrate", "--verbosity=0")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(SITE / "manage.py"), *arguments]

    def manage(self, *arguments: str) -> str:
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment,
            cwd="/",  # the project is found wherever the command runs
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def shell(self, code: str) -> str:
        return self.manage("shell", "--verbosity=0", "-c", code).strip()

    @contextlib.contextmanager
    def worker(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            self.command("tidemill", "worker", "-p", "1", *options), env=self.environment, cwd="/"
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
