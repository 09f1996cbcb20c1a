"""The command ``tidemill demo``: enqueue missing jobs, run a worker, show the progress, report.

The demo keeps all its state in its home: the store, the report and the worker's log. The demo and
its worker may be killed at any moment. The next run recognizes the jobs by their ids.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tidemill.core.config import lmdb_url
from tidemill.core.job import Outcome, Record, State
from tidemill.core.words import counted
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from tidemill.app import Tidemill

_BATCH = 500
_DELAY = 1.0
_LOOK_EVERY = 0.2
_NAME_MOST = 150
_SKIPPED = {"node_modules", "venv", "__pycache__"}
_TIMES_OUT, _DELAYED = "times-out", "delayed"


@click.command(context_settings={"show_default": True})
@click.argument(
    "folder",
    metavar="[DIR]",
    default=".",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option(
    "--store",
    default=".tidemill/demo",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the demo keeps its jobs, its report and the log of its worker.",
)
@click.option("--fresh", is_flag=True, help="Forget earlier runs and start over.")
@click.option(
    "-p", "--processes", type=click.IntRange(1, 64), default=2, help="Processes of the worker."
)
@click.option(
    "-c", "--concurrency", type=click.IntRange(1, 64), default=4, help="Jobs in each process."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
def demo(
    folder: Path, store: Path, fresh: bool, processes: int, concurrency: int, as_json: bool
) -> None:
    """Measure every file of DIR, one job per file.

    The demo has a store and a worker of its own.

    Kill all processes of the demo with kill -9 in the middle, and start the demo again. It finishes
    the remaining jobs, and runs no finished job again.
    """
    options = ["-p", str(processes), "-c", str(concurrency)]
    sys.exit(_run(folder.absolute(), store.absolute(), options, fresh=fresh, quiet=as_json))


def _run(folder: Path, home: Path, options: list[str], *, fresh: bool, quiet: bool) -> int:
    """Run the whole demo, with these options of its worker; return the exit code.

    0 means that all jobs have finished, 1 that a job did not finish, and 130 means Ctrl-C.

    Raises:
        TidemillError: the home is in use or cannot be used, the folder has no files, or the worker
            ended by itself.
    """
    began = time.monotonic()
    os.environ["TIDEMILL_DEMO"] = str(home)  # for the tasks, here and in the worker
    with _alone(home):
        if fresh:
            shutil.rmtree(home / "store", ignore_errors=True)
        from tidemill.demo.tasks import mill

        files = _find_files(folder, home)
        if not files:
            raise TidemillError(f"{folder} has no files to measure; name another folder")
        with mill:
            records = _records(mill, files)
            done = sum(record is not None and record.state.finished for record in records.values())
            if not quiet:
                jobs = counted(len(records), "job")
                sys.stderr.write(f"{jobs} for {folder}, {done:,} done before\n")
            try:
                if done < len(records):
                    _work(mill, files, home, options, quiet)
            except KeyboardInterrupt:
                sys.stderr.write("stopped; the same command goes on where it was\n")
                return 130
            report = _report(folder, _records(mill, files), done)
    report["seconds"] = round(time.monotonic() - began, 2)
    data = msgspec.json.format(msgspec.json.encode(report), indent=2)
    (home / "report.json").write_bytes(data + b"\n")
    if quiet:
        sys.stdout.write(data.decode() + "\n")
    else:
        _print(report, home)
    return 1 if report["unfinished"] else 0


def _find_files(folder: Path, home: Path) -> dict[str, str]:
    """{job id: absolute path} of the regular files below a folder.

    Hidden folders, ``node_modules`` and the like, symbolic links, names that are not UTF-8 and the
    demo's own ``home`` are skipped.
    """
    found: dict[str, str] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and name[0] != "." and Path(parent, name) != home
        )
        for path in (os.path.join(parent, name) for name in sorted(names)):
            with contextlib.suppress(OSError, UnicodeEncodeError):  # it may vanish meanwhile
                path.encode()
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):  # a changed file is a new job
                    version = f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()
                    mark = hashlib.blake2s(version, digest_size=6).hexdigest()
                    name = os.path.relpath(path, folder)
                    usable = name.isprintable() and len(name.encode()) <= _NAME_MOST
                    found[f"{name if usable else 'file'}@{mark}"] = path
    return found


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Lock the home for this run. The kernel frees the lock however this process ends."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        file = open(home / "lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise TidemillError(f"cannot use {home}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"a demo is running in {home} already; name another home with --store"
            raise TidemillError(text) from None
        yield


def _records(mill: Tidemill, files: dict[str, str]) -> dict[str, Record | None]:
    return {name: mill.broker.get(name) for name in (*files, _TIMES_OUT, _DELAYED)}


def _work(
    mill: Tidemill, files: dict[str, str], home: Path, options: list[str], quiet: bool
) -> None:
    """Enqueue missing jobs, and run a worker until all jobs have finished."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from tidemill.cli.console import console

    columns = BarColumn(None), MofNCompleteColumn(), TextColumn("{task.description}")
    bar = Progress(*columns, console=console(stderr=True), transient=True, disable=quiet)
    before = sum(row.retried for row in mill.queues())
    with _worker(home, options) as worker, bar:
        _put(mill, files)
        rows = mill.queues()
        total = left = sum(row.size for row in rows)
        task = bar.add_task("", total=total)
        while left:
            retried = sum(row.retried for row in rows) - before
            running = sum(row.running for row in rows)
            text = f"{running:,} leased, {retried:,} retried"
            bar.update(task, completed=total - left, description=text)
            if worker.poll() is not None:
                text = f"the worker ended with code {worker.returncode}"
                raise TidemillError(f"{text}; its log is {home / 'worker.log'}")
            time.sleep(_LOOK_EVERY)  # this delays the display, not the jobs
            rows = mill.queues()
            left = sum(row.size for row in rows)


def _put(mill: Tidemill, files: dict[str, str]) -> None:
    """Enqueue every job that the store does not have, one commit per batch."""
    from tidemill.demo.tasks import measure, never_ends, on_time

    if mill.broker.get(_TIMES_OUT) is None:
        never_ends.using(id=_TIMES_OUT).enqueue()
    if mill.broker.get(_DELAYED) is None:
        on_time.using(id=_DELAYED, delay=_DELAY).enqueue(time.time() + _DELAY)
    missing = [name for name in files if mill.broker.get(name) is None]
    for start in range(0, len(missing), _BATCH):
        part = missing[start : start + _BATCH]
        mill.enqueue_many(measure.using(id=name).call(files[name]) for name in part)


@contextlib.contextmanager
def _worker(home: Path, options: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker during the block. The worker also ends when this process dies."""
    command = [sys.executable, "-m", "tidemill", "worker", "tidemill.demo.tasks:mill", *options]
    command += ["--name", "demo", "--shutdown-timeout", "5", "--ends-with", str(os.getpid())]
    with open(home / "worker.log", "ab") as log:
        worker = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,  # python -m must not import modules from the user's folder
            start_new_session=True,  # Ctrl-C reaches only this process
        )
    try:
        yield worker
    finally:
        worker.terminate()
        try:
            worker.wait(15)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _report(folder: Path, found: dict[str, Record | None], done: int) -> dict[str, Any]:
    timed_out, late = found[_TIMES_OUT], found[_DELAYED]
    records = [record for record in found.values() if record is not None]
    files = [r for r in records if r.state is State.SUCCEEDED and r is not late]
    same: dict[str, list[str]] = collections.defaultdict(list)
    for record in files:
        if record.result["bytes"]:
            same[record.result["sha256"]].append(os.path.relpath(record.result["path"], folder))
    took = sorted((r.attempts[-1].ended - r.attempts[-1].started, r.envelope.id) for r in files)
    bad = [r for r in records if r.state is State.FAILED and r is not timed_out]
    return {
        "folder": str(folder),
        "jobs": len(found),
        "files": len(files),
        **{name: sum(r.result[name] for r in files) for name in ("bytes", "lines", "words")},
        "slowest": [{"job": name, "seconds": round(s, 4)} for s, name in took[:-4:-1]],
        "duplicates": sorted(paths for paths in same.values() if len(paths) > 1),
        "failed": [{"job": r.envelope.id, "error": r.error} for r in bad],
        "retried": sum(a.outcome == Outcome.RETRY for r in records for a in r.attempts),
        "late_ms": late.result if late and late.state is State.SUCCEEDED else None,
        "timed_out": timed_out.error if timed_out else "",
        "unfinished": len(found) - sum(record.state.finished for record in records),
        "done_before": done,
    }


def _print(report: dict[str, Any], home: Path) -> None:
    """Print the report for people on stdout."""
    from tidemill.cli.console import clean, console
    from tidemill.doctor.words import duration, size

    out, late = console(), report["late_ms"]
    doubles = sum(len(paths) - 1 for paths in report["duplicates"])
    program = "tidemill" if shutil.which("tidemill") else f"{sys.executable} -m tidemill"
    for name, text in (
        ("files", f"{report['files']:,} with {size(report['bytes'])}"),
        ("text", f"{report['lines']:,} lines, {report['words']:,} words"),
        ("doubles", f"{doubles:,} files have the same content as another"),
        *(("slowest", f"{duration(row['seconds'])}  {row['job']}") for row in report["slowest"]),
        ("delayed", "" if late is None else f"started {duration(late / 1000)} after its time"),
        ("timed out", report["timed_out"]),
        *(("failed", f"{row['job']}: {row['error']}") for row in report["failed"][:5]),
        ("retried", counted(report["retried"], "failed attempt")),
        ("before", f"{report['done_before']:,} of {report['jobs']:,} jobs had finished already"),
        ("took", f"{report['seconds']:g} s; report: {home / 'report.json'}"),
        ("look", f"{program} jobs --url {shlex.quote(lmdb_url(home / 'store'))}"),
    ):
        if text:
            out.print(f"{name:<10} {clean(text, one_line=True)}", soft_wrap=True)
