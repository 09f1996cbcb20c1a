"""An app in the caller's own LMDB environment, served by a real worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

APP = """
import lmdb
from tidemill import Tidemill

env = lmdb.open("data", map_size=1 << 28, max_dbs=20)
mill = Tidemill(env=env, prefix="mine-")

@mill.task
def double(n):
    return 2 * n
"""

ENQUEUE = """
from app import double, env, mill
with env.begin(write=True) as txn:
    txn.put(b"order", b"17")
    job = mill.enqueue(double.using(txn=txn).call(21))
print(job.id)
"""

RESULT = "import sys; from app import mill; print(mill.job(sys.argv[1]).result(timeout=0))"


def python(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, *args], cwd=folder, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.everyday
def test_a_worker_finds_the_store_by_the_apps_url(tmp_path: Path) -> None:
    # case Q4, law 17
    (tmp_path / "app.py").write_text(APP)
    job_id = python(tmp_path, "-c", ENQUEUE)
    python(tmp_path, "-m", "tidemill", "worker", "app:mill", "--burst")
    assert python(tmp_path, "-c", RESULT, job_id) == "42"
