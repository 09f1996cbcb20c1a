"""The app of ``tidemill demo``: three tasks, as in a user's own module."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from pathlib import Path
from typing import Any

from tidemill import Fail, Retries, Tidemill, this_job
from tidemill.core.config import lmdb_url

HOME = Path(os.environ.get("TIDEMILL_DEMO", ".tidemill/demo")).absolute()
STORE = lmdb_url(HOME / "store")

# Results are kept for 30 days, so that a later run still knows the finished jobs.
mill = Tidemill(f"{STORE}?keep=2592000&keep_count=10000000")


@mill.task(timeout=60, retries=Retries(3, delay=0.3, cap=2.0))
def measure(path: str) -> dict[str, Any]:
    """Digest, bytes, lines and words of a file."""
    flaky_step(path)
    digest, lines, words = hashlib.sha256(), 0, 0
    try:
        with open(path, "rb") as file:
            while part := file.readline(1 << 16):
                digest.update(part)
                lines += part.endswith(b"\n")
                words += len(part.split())
            size = file.tell()
    except OSError as error:
        raise Fail(f"cannot read the file: {error.strerror}") from error
    return {
        "path": path,
        "sha256": digest.hexdigest(),
        "bytes": size,
        "lines": lines,
        "words": words,
    }


def flaky_step(path: str) -> None:
    """Fail like a network in the first attempt at about every tenth file; the job is retried."""
    job = this_job(None)
    if job and job.attempt == 1 and zlib.crc32(os.path.basename(path).encode()) % 10 == 0:
        job.log("the network is down")
        raise ConnectionError("the network is down; the next attempt will do")


@mill.task
async def on_time(due: float) -> float:
    """Return the milliseconds from the due time of this delayed job to its start."""
    return (time.time() - due) * 1000


@mill.task(timeout=1, retries=0)
def never_ends() -> None:
    """Run until the timeout ends the job as failed, with the place in the code."""
    while True:
        time.sleep(0.05)
