"""Deleting a queue through the API, the command line and the job server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill import Tidemill, TidemillError

pytestmark = pytest.mark.everyday


def names(mill: Tidemill) -> list[str]:
    return [row.name for row in mill.queues()]


def test_a_queue_with_jobs_is_deleted_only_with_force(mill: Tidemill) -> None:
    orders = mill.queue("orders")
    orders.put_many(["ready", "failed"])
    message = orders.get(timeout=10)
    message.bury("it cannot work")

    with pytest.raises(TidemillError, match="1 unfinished job; purge it first"):
        orders.delete()
    assert orders.purge(now=True) == 1
    with pytest.raises(TidemillError, match="keeps finished jobs"):
        orders.delete()
    assert names(mill) == ["orders"]

    assert orders.delete(force=True) == 1
    assert names(mill) == []
    assert list(mill.jobs()) == []


def test_the_command_line_deletes_a_queue(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"
    with Tidemill(url) as mill:
        mill.queue("orders").put("one")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidemill", "delete-queue", *words, "--url", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    refused = run("orders")
    assert refused.returncode == 1
    assert "queue 'orders' has 1 unfinished job" in refused.stderr

    done = run("orders", "--force", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"queue": "orders", "deleted": 1}
    with Tidemill(url) as mill:
        assert names(mill) == []
