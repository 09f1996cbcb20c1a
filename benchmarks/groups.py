"""A group with a completion hook against the same jobs alone, on LMDB, interleaved.

    python benchmarks/groups.py [MEMBERS] [ROUNDS]

Prints seconds to enqueue and to run, of a burst worker with one process and eight threads.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

APP = """
from tidemill import Tidemill
mill = Tidemill({url!r})

@mill.task
def nothing(n): pass

@mill.task
def told(ended): pass
"""


def main(members: int = 10_000, rounds: int = 3) -> None:
    """Run both kinds in turn."""
    for turn in range(rounds):
        for kind in ("alone", "group"):
            with tempfile.TemporaryDirectory() as folder:
                enqueue, run = measure(Path(folder), kind, members)
            print(f"{turn} {kind}: enqueue {enqueue:.2f} s, run {run:.2f} s")


def measure(folder: Path, kind: str, members: int) -> tuple[float, float]:
    """(seconds to enqueue, seconds to run)"""
    (folder / "bench.py").write_text(APP.format(url=f"lmdb://{folder}/store"))
    lines = {
        "alone": "mill.enqueue_many([nothing.call(n) for n in range(members)])",
        "group": "mill.enqueue(map_many(nothing, range(members)).on_complete(told))",
    }
    script = (
        f"import time; from bench import *; from tidemill import map_many; members = {members}\n"
        f"mill.queues(); start = time.perf_counter(); {lines[kind]}\n"
        "print(time.perf_counter() - start)"
    )
    python = [sys.executable]
    done = subprocess.run(
        [*python, "-c", script], cwd=folder, capture_output=True, check=True, text=True
    )
    start = time.perf_counter()
    subprocess.run(
        [*python, "-m", "tidemill", "worker", "bench:mill", "--burst", "-p", "1", "-c", "8"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return float(done.stdout), time.perf_counter() - start


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
