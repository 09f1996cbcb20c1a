"""What limits cost, and how exact a rate is.

    python benchmarks/limits.py [JOBS] [ROUNDS] [URL]

Drains no-op jobs with a burst worker of two processes, without a limit and under several that are
set high, in turn; prints jobs per second from the first start to the last, and the median of the
ratios to the plain one of the same round. Then runs 10 s of a rate with four worker processes and a
burst of a tenth of a second, and prints how many jobs started in each second, and how far that was
from the rate asked for. A URL ends where the name of a store is put, as in
``redis://host/0?prefix=``; without one each store is a folder of LMDB's.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

APP = """
import mmap, os, struct, time
from tidemill import Limit, Tidemill

mill = Tidemill({url!r})
_own = open(os.path.join({folder!r}, f"starts.{{os.getpid()}}"), "ab", buffering=0)

def work(n):
    _own.write(struct.pack("d", time.time()))

plain = mill.task(name="plain", queue="plain")(work)
queue_rate = mill.task(name="queue_rate", queue="rated")(work)
queue_slots = mill.task(name="queue_slots", queue="slots")(work)
rate = mill.task(name="rate", limit=Limit("1000000/s"))(work)
slots = mill.task(name="slots", limit=Limit(concurrency=100000))(work)
for count in (1, 100, 10_000):
    key = lambda n, count=count: n % count
    high = Limit("1000000/s", key=key)
    globals()[f"rate_{{count}}"] = mill.task(name=f"rate_{{count}}", limit=high)(work)
    high = Limit(concurrency=100000, key=key)
    globals()[f"slots_{{count}}"] = mill.task(name=f"slots_{{count}}", limit=high)(work)
exact = mill.task(name="exact", queue="exact")(work)
"""
QUEUES = ("queue_rate", "queue_slots")
KEYS = tuple(f"{kind}_{count}" for kind in ("rate", "slots") for count in (1, 100, 10_000))
KINDS = ("plain", *QUEUES, "rate", "slots", *KEYS)
RATES = (100, 1000)


def main(jobs: int = 20_000, rounds: int = 5, url: str = "") -> None:
    """Measure and print."""
    figures: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                figures[kind].append(drain(Path(folder), url, kind, jobs))
    for kind, found in figures.items():
        ratios = [one / plain for one, plain in zip(found, figures["plain"], strict=True)]
        ratio = statistics.median(ratios)
        print(f"{kind}: {statistics.median(found):,.0f}/s, {ratio:.0%} of plain")
    for rate in RATES:
        with tempfile.TemporaryDirectory() as folder:
            print(exactness(Path(folder), url, rate))


def _prepare(folder: Path, url: str, script: str) -> None:
    at = url + folder.name if url else f"lmdb://{folder}/store"
    (folder / "bench.py").write_text(APP.format(url=at, folder=str(folder)))
    subprocess.run([sys.executable, "-c", f"from bench import *\n{script}"], cwd=folder, check=True)
    for path in folder.glob("starts.*"):
        path.unlink()


def _worker(*options: str) -> list[str]:
    return [sys.executable, "-m", "tidemill", "worker", "bench:mill", *options]


def starts(folder: Path) -> list[float]:
    """When jobs started, in order."""
    import array

    times = array.array("d")
    for path in folder.glob("starts.*"):
        times.frombytes(path.read_bytes())
    return sorted(times)


def drain(folder: Path, url: str, kind: str, jobs: int) -> float:
    """Jobs per second."""
    limits = (
        'mill.queue("rated", rate="1000000/s")\nmill.queue("slots", concurrency=100000)\n'
    )
    _prepare(folder, url, f"{limits}mill.enqueue_many([{kind}.call(n) for n in range({jobs})])")
    subprocess.run(
        _worker("--burst", "-p", "2", "-c", "8"), cwd=folder, check=True, capture_output=True
    )
    times = starts(folder)
    assert len(times) == jobs, f"{len(times)} of {jobs}"
    return (jobs - 1) / (times[-1] - times[0])


def exactness(folder: Path, url: str, rate: int, seconds: int = 10) -> str:
    """How many jobs of a rate started in each second, with four processes."""
    _prepare(
        folder,
        url,
        f'mill.queue("exact", rate="{rate}/s", burst={rate // 10})\n'
        f"mill.enqueue_many([exact.call(n) for n in range({rate * (seconds + 5)})])",
    )
    worker = subprocess.Popen(
        _worker("-p", "4", "-c", "4"), cwd=folder, stderr=subprocess.DEVNULL
    )
    try:
        while len(starts(folder)) < rate * (seconds + 3):
            time.sleep(0.2)
    finally:
        worker.terminate()
        worker.wait()
    times = starts(folder)
    begin = times[0] + 1  # once all processes are there
    counts = [sum(begin + n <= t < begin + n + 1 for t in times) for n in range(seconds)]
    off = sum(counts) / (rate * seconds) - 1
    return f"{rate}/s over {seconds} s: {off:+.2%}, each second {counts}"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:4])
