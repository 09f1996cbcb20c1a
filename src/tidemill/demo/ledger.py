"""The ledger: a file that is only ever appended to, one line per execution of a job.

It is written by the tasks themselves and owes the store nothing: two books, so that one can be
checked against the other. Besides ``ran`` lines it has ``finished`` lines, written by the demo for
jobs that the store says are done. A ``ran`` below a ``finished`` of the same job would be work done
twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

__all__ = ["Account", "Ledger"]


class Account(msgspec.Struct):
    """What the ledger says: runs by job, jobs noted as finished, runs of finished jobs."""

    runs: dict[str, int] = {}
    finished: set[str] = set()
    redone: list[str] = []

    @property
    def executions(self) -> int:
        """How often anything ran, in all runs of the demo."""
        return sum(self.runs.values())


class Ledger:
    """The file. Any number of processes append at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ran(self, job_id: str, attempt: int) -> None:
        """Note that an execution begins."""
        self._append(f"\nran\t{time.time():.3f}\t{os.getpid()}\t{attempt}\t{job_id}")

    def finished(self, job_ids: Iterable[str]) -> None:
        """Note that these jobs are done, as the store says."""
        lead = f"\nfinished\t{time.time():.3f}\t{os.getpid()}\t-\t"
        self._append("".join(lead + job_id for job_id in job_ids))

    def _append(self, lines: str) -> None:
        # Line breaks lead, so that a line torn by a kill cannot run into the next one.
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, lines.encode())
        finally:
            os.close(fd)

    def read(self) -> Account:
        """Add up the whole file, in its order."""
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
