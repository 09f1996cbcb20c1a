"""``tidemill worker``: run the jobs of an app."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tidemill.brokers.contract.exchange import Mode
from tidemill.cli.connect import log_options, with_default
from tidemill.core.config import check_name
from tidemill.core.log_output import LogSettings, log_output

_CHECKS = 1.0  # seconds between two checks of the parent process where the kernel sends no signal


def usable_cores(proc: Path = Path("/proc/self"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use, by its affinity and the CPU limit of its cgroups.

    At least 1; a part of a core counts as a core. A container with a limit of two cores still sees
    all cores of the machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = (math.ceil(limit) for limit in _limits(proc, mount))
    return max(1, min([cores or 1, *limits]))


def _limits(proc: Path, mount: Path) -> Iterator[float]:
    """The limits in cores of the cgroups of this process, and of the cgroups above them."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:  # no Linux, or no /proc
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        top = mount if number == "0" else mount / controllers
        if number != "0" and not top.is_dir():
            top = mount / "cpu"
        # In a container, the path may be valid only on the host. Then the limit is at the mount.
        below = Path(path.lstrip("/"))
        for folder in (below, *below.parents):
            limit = _limit(top / folder)
            if limit is not None:
                yield limit


def _limit(folder: Path) -> float | None:
    """The limit of one cgroup: version 2 has both numbers in one file, version 1 has two files."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or another format
            continue
    return None


@click.command()
@click.argument("app", envvar="TIDEMILL_APP", required=False)
@click.option(
    "-p",
    "--processes",
    type=click.IntRange(1, 512),
    default=usable_cores,
    show_default="one per core that this process may use",
    help="The number of worker processes.",
)
@with_default(
    "-c --concurrency",
    click.IntRange(1, 10_000),
    8,
    "Jobs at a time in each process; 1 runs them in the main thread.",
)
@click.option(
    "-Q",
    "--queues",
    help="Serve only these queues, comma-separated, and empty the first before the second.",
)
@click.option(
    "--order",
    type=click.Choice([str(m) for m in Mode]),
    help="The order of several queues: strict (default with -Q), fair (default without) or merged.",
)
@click.option("--burst", is_flag=True, help="End when no job is ready any more.")
@with_default(
    "--stuck-grace",
    click.FloatRange(0),
    60.0,
    "Seconds for the other jobs of a process with a stuck job; an hour if one of these jobs "
    "cannot be retried.",
)
@with_default(
    "--shutdown-timeout",
    click.FloatRange(0),
    30.0,
    "Seconds for running jobs after the first TERM or INT.",
)
@click.option(
    "--max-jobs",
    type=click.IntRange(0),
    default=0,
    help="Replace a process after this many jobs; 0 for never.",
)
@click.option(
    "--max-memory",
    type=click.IntRange(0),
    default=0,
    metavar="MB",
    help="Replace a process that uses more megabytes; 0 for never.",
)
@click.option(
    "--slow",
    type=click.FloatRange(0),
    default=0.0,
    envvar="TIDEMILL_SLOW",
    show_envvar=True,
    metavar="SECONDS",
    help="Log a warning for each run that takes this long; 0 for never.",
)
@click.option("--name", default="", help="The name of this worker in trails; default host:pid.")
@click.option(
    "--release",
    default="",
    envvar="TIDEMILL_RELEASE",
    show_envvar=True,
    metavar="NAME",
    help="The version of the app's code, by which the history tells failures and times apart.",
)
@click.option(
    "--reload", is_flag=True, help="For development: reload when a .py file in this folder changes."
)
@click.option(
    "--reload-folder",
    default=".",
    hidden=True,
    envvar="TIDEMILL_RELOAD_FOLDER",
    help="The folder that --reload watches.",
)
@click.option(
    "--ends-with", type=int, default=0, hidden=True, help="End together with this process."
)
@log_options
def worker(
    ends_with: int,
    queues: str | None,
    order: str | None,
    max_memory: int,
    release: str,
    reload: bool,
    reload_folder: str,
    logs: LogSettings,
    **settings: Any,
) -> None:
    """Run the jobs of APP (module:variable or a path to a .py file).

    Without APP, the command takes the app of $TIDEMILL_APP.

    Signals: TERM or INT finishes the running jobs and ends; a second signal, at least 0.2 s
    later, ends at once. HUP reloads the app. QUIT ends at once. USR1 prints all stacks.

    Exit codes: 0 clean, 1 jobs were interrupted, 2 wrong usage or import error, 3 the store cannot
    be reached, is full or has moved.
    """
    if not settings["app"]:
        raise click.UsageError(
            "name the app, as in tidemill worker shop:mill; or set $TIDEMILL_APP"
        )

    from tidemill.client.context import mark_records
    from tidemill.worker.settings import Settings
    from tidemill.worker.supervisor import Start, Supervisor, install

    with log_output(logs):
        mark_records()  # for the supervisor; worker processes do the same
    names = _names(queues)
    mode = Mode(order) if order else Mode.STRICT if names else Mode.FAIR
    if ends_with:
        _end_with(ends_with)
    if release:
        check_name("release", release)
    given = Settings(
        queues=names, mode=mode, max_memory=max_memory << 20, release=release, **settings
    )
    supervisor = Supervisor(given)
    if logs.number <= logging.INFO:
        supervisor.announce = Start.log_details if logs.format == "json" else Start.print
    if reload:
        folder = os.path.abspath(reload_folder)
        first = snapshot(folder)  # before install, so that a signal can end a long snapshot
        install(supervisor)
        watch(folder, first)
    else:
        install(supervisor)
    sys.exit(supervisor.run())


def _names(queues: str | None) -> tuple[str, ...]:
    if queues is None:
        return ()
    names = [part.strip() for part in queues.split(",")]
    if "" in names:
        what = "no queue" if not any(names) else "an empty name among the queues"
        raise click.UsageError(f"-Q {queues!r} has {what}; write it as -Q urgent,normal")
    return tuple(check_name("queue", name) for name in dict.fromkeys(names))


def _end_with(parent: int) -> None:
    """Send TERM to this process when ``parent``, which started it, has ended, also by SIGKILL."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent died before the call of prctl
            os.kill(os.getpid(), signal.SIGTERM)
        return

    def look() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(_CHECKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="tidemill-parent", daemon=True).start()


log = logging.getLogger("tidemill.reload")

EVERY = 1.0  # seconds between two checks of the files
_SKIPPED = {"__pycache__", "node_modules", "venv", "site-packages"}


def snapshot(folder: str) -> dict[str, tuple[int, int]]:
    """(time of change, size) of every .py file below a folder; hidden folders are left out."""
    seen = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(parent, name)
                try:
                    stat = os.stat(path)
                except OSError:  # the file was just deleted, and the next check notices that
                    continue
                seen[path] = stat.st_mtime_ns, stat.st_size
    return seen


def watch(folder: str, first: dict[str, tuple[int, int]]) -> None:
    """Send this process a HUP, which reloads the worker, after each change of a .py file."""
    # ``first`` is a snapshot of the folder.

    def check() -> None:
        before = first
        pause = threading.Event()
        while not pause.wait(EVERY):
            now = snapshot(folder)
            changed = sorted({path for path, _ in before.items() ^ now.items()})
            if changed:
                log.info("%s changed", ", ".join(os.path.relpath(p, folder) for p in changed[:3]))
                os.kill(os.getpid(), signal.SIGHUP)
            before = now

    threading.Thread(target=check, name="tidemill-reload", daemon=True).start()
