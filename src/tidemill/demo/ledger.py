"""The ledger: an append-only file with one line per execution of a job.

The ledger does not depend on the store, so the demo can check the store by the ledger. The tasks
write ``ran`` lines. The demo writes ``finished`` lines for jobs that are finished in the store. A
``ran`` line below a ``finished`` line of the same job means that a finished job ran again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec


class Account(msgspec.Struct):
    """The sum of the ledger: executions by job, finished jobs, and finished jobs that ran again."""

    runs: dict[str, int] = {}
    finished: set[str] = set()
    redone: list[str] = []

    @property
    def executions(self) -> int:
        """The number of executions in all runs of the demo."""
        return sum(self.runs.values())


class Ledger:
    """The ledger file. Any number of processes may append at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ran(self, job_id: str, attempt: int) -> None:
        """Write that an execution begins."""
        self._append(f"\nran\t{time.time():.3f}\t{os.getpid()}\t{attempt}\t{job_id}")

    def finished(self, job_ids: Iterable[str]) -> None:
        """Write that these jobs are finished in the store."""
        lead = f"\nfinished\t{time.time():.3f}\t{os.getpid()}\t-\t"
        self._append("".join(lead + job_id for job_id in job_ids))

    def _append(self, lines: str) -> None:
        # Each line begins with a line break. So a line that a kill cut off never joins the next
        # line.
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, lines.encode())
        finally:
            os.close(fd)

    def read(self) -> Account:
        """Read the whole file in order, and add up its lines."""
        account = Account()
        if not self.path.exists():
            return account
        with open(self.path, encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.rstrip("\n").split("\t")
                if len(fields) != 5:
                    continue
                kind, job_id = fields[0], fields[4]
                if kind == "finished":
                    account.finished.add(job_id)
                elif kind == "ran":
                    account.runs[job_id] = account.runs.get(job_id, 0) + 1
                    if job_id in account.finished:
                        account.redone.append(job_id)
        return account
