"""The cores that a process may use, by its affinity and by files of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidemill.cli.worker import usable_cores


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def cores(tmp_path: Path, cgroup: str, files: dict[str, str]) -> int:
    """The answer for a process in these cgroups, with these files below the mount point."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return usable_cores(tmp_path / "proc", tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("max 100000\n", 8), ("200000 100000\n", 2), ("150000 100000\n", 2)),
        *(("10000 100000\n", 1), ("6400000 100000\n", 8), ("broken", 8), ("1 0", 8)),
    ],
)
def test_a_limit_of_version_2(tmp_path: Path, text: str, expected: int) -> None:
    assert cores(tmp_path, "0::/\n", {"cpu.max": text}) == expected


def test_the_least_limit_of_all_cgroups_above_counts(tmp_path: Path) -> None:
    files = {
        "shop.slice/cpu.max": "300000 100000",
        "shop.slice/worker.service/cpu.max": "max 100000",
    }
    assert cores(tmp_path, "0::/shop.slice/worker.service\n", files) == 3


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize("below", ["docker/1a2b/", ""])
def test_a_limit_of_version_1(tmp_path: Path, folder: str, below: str) -> None:
    # given: two cores, in the cgroup of the process or, as containers show it, at the top
    files = {
        f"{folder}/{below}cpu.cfs_quota_us": "200000\n",
        f"{folder}/{below}cpu.cfs_period_us": "100000\n",
    }
    cgroup = "5:memory:/docker/1a2b\n4:cpu,cpuacct:/docker/1a2b\n0::/docker/1a2b\n"
    assert cores(tmp_path, cgroup, files) == 2


def test_no_limit_of_version_1(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert cores(tmp_path, "4:cpu,cpuacct:/\n", files) == 8


def test_the_affinity_counts_without_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usable_cores(tmp_path / "nothing", tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert usable_cores(tmp_path / "nothing", tmp_path) == 1


def test_all_cores_count_where_there_is_no_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert usable_cores(tmp_path / "nothing", tmp_path) == 4
