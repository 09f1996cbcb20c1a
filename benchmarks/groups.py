"""A group with a completion hook against the same jobs alone, interleaved.

    python benchmarks/groups.py [MEMBERS] [ROUNDS] [URL]

Prints seconds to enqueue and to run, of a burst worker with one process and eight threads, and the
ratio of the medians. A URL ends where the name of a store is put, as in ``redis://host/0?prefix=``;
without one each store is a folder of LMDB's.
"""

from __future__ import annotations

import statistics
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


def main(members: int = 10_000, rounds: int = 3, url: str = "") -> None:
    """Run both kinds in turn."""
    took: dict[str, list[tuple[float, float]]] = {"alone": [], "group": []}
    for turn in range(rounds):
        for kind, times in took.items():
            with tempfile.TemporaryDirectory() as folder:
                at = url + Path(folder).name if url else f"lmdb://{folder}/store"
                enqueue, run = measure(Path(folder), kind, members, at)
            times.append((enqueue, run))
            print(f"{turn} {kind}: enqueue {enqueue:.2f} s, run {run:.2f} s")
    for what, place in (("enqueue", 0), ("run", 1)):
        alone, group = (statistics.median(t[place] for t in took[kind]) for kind in took)
        print(f"{what}: {group / alone:.2f} of alone")


def measure(folder: Path, kind: str, members: int, url: str) -> tuple[float, float]:
    """(seconds to enqueue, seconds to run)"""
    (folder / "bench.py").write_text(APP.format(url=url))
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
    main(*map(int, sys.argv[1:3]), *sys.argv[3:4])
