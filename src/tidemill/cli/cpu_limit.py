"""The number of cores that this process may use: its affinity, and the CPU limit of its cgroups.

A container with a limit of two cores still sees all cores of the machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(proc: Path = Path("/proc/self"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use, at least 1. A part of a core counts as a core."""
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
        names = controllers.split(",")
        if number != "0" and "cpu" not in names:
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
