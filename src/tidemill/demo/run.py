"""Run the demo: enqueue missing jobs, start a worker, watch it, stop it, and report.

The demo keeps all its state in its home: the store, the ledger, the report and the worker's log.
The demo and its worker may be killed at any moment. The next run recognizes the jobs by their ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidemill.app import Tidemill
from tidemill.core.config import lmdb_url
from tidemill.core.errors import TidemillError
from tidemill.core.job import Record, State
from tidemill.demo.display import Counts, Display
from tidemill.demo.files import find_files
from tidemill.demo.report import Report, make_report, print_report

DELAY = 1.0
"""Seconds of the delayed job's delay."""

_BATCH = 500
_LOOK_EVERY = 0.2
_OWN = ("store", "ledger", "report.json", "worker.log")


class Demo:
    """One run on one folder. The app is bound to one home, so a process runs only one demo."""

    def __init__(
        self,
        folder: Path,
        home: Path,
        processes: int = 2,
        concurrency: int = 4,
        *,
        quiet: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        self.home = home.absolute()
        self.processes = processes
        self.concurrency = concurrency
        self.quiet = quiet
        self.report_path = self.home / "report.json"

    def run(self, *, fresh: bool = False) -> int:
        """Run the whole demo; return the exit code.

        0 means that all jobs have finished, and no finished job ran again. 1 means that a job did
        not finish, or that a finished job ran again. 130 means Ctrl-C.

        Raises:
            TidemillError: the home is in use or cannot be used, the folder has no files, or the
                worker ended by itself.
        """
        began = time.monotonic()
        os.environ["TIDEMILL_DEMO"] = str(self.home)  # for the tasks, here and in the worker
        with self._alone():
            if fresh:
                self._forget()
            from tidemill.demo.tasks import ledger, mill

            files, left_out = find_files(self.folder, self.home)
            if not files:
                raise TidemillError(f"{self.folder} has no files to measure; name another folder")
            with mill:
                done_before = self._finished(mill, files)
                # Write these jobs before any job can run: from now on, a run of such a job is an
                # error.
                ledger.finished(sorted(done_before - ledger.read().finished))
                try:
                    self._work(mill, files, len(done_before))
                except KeyboardInterrupt:
                    self._say("stopped; the same command goes on where it was")
                    return 130
                ledger.finished(sorted(self._finished(mill, files) - done_before))
                account = ledger.read()
                others = [mill.broker.get(i) for i in {*account.runs, *_SPECIAL} if i not in files]
                report = make_report(
                    str(self.folder),
                    {job_id: mill.broker.get(job_id) for job_id in files},
                    [record for record in others if record is not None],
                    account,
                    left_out=left_out,
                    done_before=len(done_before),
                    seconds=round(time.monotonic() - began, 2),
                )
        return self._publish(report)

    # -- the home -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the home for this run. The kernel frees the lock however this process ends."""
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            file = open(self.home / "lock", "w")  # noqa: SIM115 - closed below
        except OSError as error:
            raise TidemillError(f"cannot use {self.home}: {error.strerror}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"a demo is running in {self.home} already; name another home with --store"
                raise TidemillError(text) from None
            yield

    def _forget(self) -> None:
        """Delete the files of earlier runs, and no other files in the home."""
        for name in _OWN:
            path = self.home / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    # -- the work -------------------------------------------------------------------------------

    @staticmethod
    def _finished(mill: Tidemill, files: dict[str, str]) -> set[str]:
        """The ids of the jobs that are finished in the store."""
        found = ((job_id, mill.broker.get(job_id)) for job_id in [*files, *_SPECIAL])
        return {job_id for job_id, record in found if record and _is_done(record)}

    def _work(self, mill: Tidemill, files: dict[str, str], done: int) -> None:
        """Enqueue missing jobs, and run a worker until all jobs have finished."""
        total = len(files) + len(_SPECIAL)
        if done == total:
            self._say(f"all {total:,} jobs had been done before; --fresh starts over")
            return
        went = f", {done:,} of them done before" if done else ""
        self._say(f"{total:,} jobs for {self.folder}{went}; state in {self.home}")
        before = Counts.of(mill.queues())
        with self._worker() as worker:
            self._put(mill, files)
            now = Counts.of(mill.queues())
            # An earlier run may have left unfinished jobs of files that are gone by now.
            total = done + now.left + now.done - before.done
            with Display(total, before, quiet=self.quiet).shown() as display:
                while now.left or self._kicked(mill):
                    display.tell(now)
                    if worker.poll() is not None:
                        text = f"the worker ended with code {worker.returncode}"
                        raise TidemillError(f"{text}; its log is {self.home / 'worker.log'}")
                    time.sleep(_LOOK_EVERY)  # this delays the display, not the jobs
                    now = Counts.of(mill.queues())

    @staticmethod
    def _kicked(mill: Tidemill) -> bool:
        """Retry the job that times out if a kill ended it earlier; True if the job runs again."""
        record = mill.broker.get(_TIMES_OUT)
        ended_otherwise = record is not None and not _is_done(record)
        return ended_otherwise and mill.broker.kick([_TIMES_OUT])[0]

    @staticmethod
    def _put(mill: Tidemill, files: dict[str, str]) -> None:
        """Enqueue every job that the store does not have, one commit per batch."""
        from tidemill.demo.tasks import measure, never_ends, on_time

        if mill.broker.get(_TIMES_OUT) is None:
            never_ends.using(id=_TIMES_OUT).enqueue()
        if mill.broker.get(_DELAYED) is None:
            on_time.using(id=_DELAYED, delay=DELAY).enqueue(time.time() + DELAY)
        missing = [job_id for job_id in files if mill.broker.get(job_id) is None]
        for start in range(0, len(missing), _BATCH):
            part = missing[start : start + _BATCH]
            mill.enqueue_many(measure.using(id=job_id).call(files[job_id]) for job_id in part)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker during the block, and end it cleanly.

        The worker ends when its stdin closes, so it also ends when this process dies.
        """
        arguments = [str(self.processes), str(self.concurrency)]
        with open(self.home / "worker.log", "ab") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "tidemill.demo.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.home,  # python -m must not import modules from the user's folder
            )
        try:
            yield worker
        finally:
            assert worker.stdin is not None
            worker.stdin.close()
            try:
                worker.wait(15)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    # -- telling --------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if not self.quiet:
            sys.stderr.write(text + "\n")

    def _publish(self, report: Report) -> int:
        """Write the report beside the store, and print it."""
        data = msgspec.json.format(msgspec.json.encode(report), indent=2)
        fresh = self.report_path.with_suffix(".new")
        fresh.write_bytes(data + b"\n")
        fresh.replace(self.report_path)
        if self.quiet:
            sys.stdout.write(data.decode() + "\n")
        else:
            print_report(report)
            self._say(f"\nreport: {self.report_path}; took {report.seconds:g} s")
            store = shlex.quote(lmdb_url(self.home / "store"))
            self._say(f"look around: {_program()} jobs --url {store}")
        return 0 if report.good else 1


def _program() -> str:
    """The command that runs tidemill, also when its environment is not active."""
    if shutil.which("tidemill"):
        return "tidemill"
    return f"{shlex.quote(os.path.relpath(sys.executable))} -m tidemill"


def _is_done(record: Record) -> bool:
    """True when a job has finished; the job that times out must have ended by its timeout."""
    if record.envelope.id == _TIMES_OUT:
        return record.state is State.FAILED and record.error.startswith("JobTimeout")
    return record.state.finished


_TIMES_OUT, _DELAYED = "times-out", "delayed"
_SPECIAL = (_TIMES_OUT, _DELAYED)
