"""For the tests of the command line: a store with jobs in it, and a way to call a verb."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tidemill import Retries, Tidemill, this_job
from tidemill.cli import main
from tidemill.worker.child_protocol import Hello
from tidemill.worker.declarations import TaskDeclarations
from tidemill.worker.settings import Settings
from tidemill.worker.supervisor import Supervisor


class Desk:
    """A store in a fresh directory, an app on it, and the command line pointed at it."""

    def __init__(self, folder: Path, query: str = "") -> None:
        self.folder = folder
        self.url = f"lmdb://{folder}/store{query}"
        self.mill = Tidemill(self.url)
        mill = self.mill

        @mill.task(name="add", queue="sums", tags=["maths"])
        def add(a: int, b: int = 1) -> int:
            return a + b

        @mill.task(name="bad", retries=Retries(1, delay=0))
        def bad(what: str) -> None:
            job = this_job()
            job.log(f"trying {what}")
            job.progress(1, 4)
            raise ValueError(f"cannot do {what}")

        self.add, self.bad = add, bad

    def work(self) -> None:
        """Run all that is ready, in this process."""
        supervisor = Supervisor(Settings(burst=True, concurrency=2, name="w1"), self.mill.runtime)
        assert supervisor.run() == 0

    def declare(self) -> None:
        """Store the options of the app's tasks, as a worker does at its start."""
        declared = Hello(declared=self.mill.runtime.declarations.own())
        TaskDeclarations().declare(self.mill.broker, declared)

    def run(self, *words: str, url: bool = True, **options: Any) -> Result:
        """Call a verb."""
        target = ["--url", self.url] if url else []
        return CliRunner().invoke(main, [*words, *target], **options)

    def json(self, *words: str) -> Any:
        """Call a verb and read its document."""
        result = self.run(*words, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def write_app(self) -> str:
        """A module of its own with an app on the store; returns how --app names it."""
        name = f"app_{uuid.uuid4().hex}"
        path = self.folder / f"{name}.py"
        path.write_text(
            "from tidemill import Tidemill\n"
            f"mill = Tidemill({self.url!r}, allow_imports=['math.*'])\n"
            "@mill.task(name='add', queue='sums', retries=0)\n"
            "def add(a, b=1):\n"
            "    return a + b\n"
        )
        return f"{path}:mill"

    def close(self) -> None:
        """Give the store back."""
        self.mill.close()
