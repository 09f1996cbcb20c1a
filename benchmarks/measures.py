"""What is measured, each in a few lines against the interface in ``systems/__init__.py``.

A measure takes the system and the options and returns its figures; it runs in a producer process of
its own, on an empty store. The definitions are in README.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from marks import Marks
from processes import stop, tree

BATCH = 1000
COROUTINES = 100
THREADS = 16
WARM_UP = 40
MAX_BULK = 500_000


class Options(NamedTuple):
    """How much of it; times in seconds."""

    jobs: int = 20_000
    seconds: float = 3.0  # of each enqueue measure
    budget: float = 60.0  # of each fill and each drain; what was done by then is counted
    latency_jobs: int = 300
    burst: int = 2_000
    alone: int = 100
    idle: float = 60.0


class Unsupported(Exception):
    """The system does not offer this; the table shows a dash."""


class Stalled(Exception):
    """The workers died, or did not get done in time."""


def _need(system: Any, name: str) -> Callable[..., Any]:
    found = getattr(system, name, None)
    if found is None:
        raise Unsupported(name)
    return found


# Enqueueing


def _rate(
    step: Callable[[], Any], seconds: float, each: int = 1, most: float = float("inf")
) -> float:
    done, start = 0, time.perf_counter()
    end = start + seconds
    while (now := time.perf_counter()) < end and done < most:
        step()
        done += each
    return done / (now - start)


def single(system: Any, options: Options) -> dict[str, float]:
    """Jobs per second, one call after the other."""
    if not hasattr(system, "enqueue_one"):
        return asyncio.get_event_loop().run_until_complete(_concurrent(system, options.seconds, 1))
    system.enqueue_one()
    return {"rate": _rate(system.enqueue_one, options.seconds)}


def bulk(system: Any, options: Options) -> dict[str, float]:
    """Jobs per second in calls of 1,000."""
    many = _need(system, "enqueue_many")
    many(1)
    return {"rate": _rate(lambda: many(BATCH), options.seconds, each=BATCH, most=MAX_BULK)}


async def _concurrent(system: Any, seconds: float, coroutines: int) -> dict[str, float]:
    await system.aenqueue_one()
    end = time.perf_counter() + seconds
    done = 0

    async def produce() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await system.aenqueue_one()
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*(produce() for _ in range(coroutines)))
    return {"rate": done / (time.perf_counter() - start)}


def concurrent(system: Any, options: Options) -> dict[str, float]:
    """Jobs per second from 100 coroutines of one event loop, each awaiting one at a time."""
    _need(system, "aenqueue_one")
    return asyncio.get_event_loop().run_until_complete(
        _concurrent(system, options.seconds, COROUTINES)
    )


def threads(system: Any, options: Options) -> dict[str, float]:
    """Jobs per second from 16 threads of one process, each one call after the other."""
    one = _need(system, "enqueue_one")
    one()
    counts: list[int] = []
    errors: list[BaseException] = []
    end = time.perf_counter() + options.seconds

    def produce() -> None:
        done = 0
        try:
            while time.perf_counter() < end:
                one()
                done += 1
        except Exception as error:
            errors.append(error)
        counts.append(done)

    start = time.perf_counter()
    crew = [threading.Thread(target=produce, daemon=True) for _ in range(THREADS)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(options.seconds + 60)
    if errors:
        raise errors[0]
    return {"rate": sum(counts) / (time.perf_counter() - start)}


# Running


def _fill(system: Any, count: int, budget: float) -> int:
    """Enqueue by the fastest way there is, in at most ``budget`` seconds; how many it were."""
    many = getattr(system, "enqueue_many", None)
    end = time.perf_counter() + budget
    done = 0
    while done < count and time.perf_counter() < end:
        batch = min(BATCH, count - done)
        if many:
            many(batch)
        else:
            for _ in range(batch):
                system.enqueue_one()
        done += batch
    return done


@contextlib.contextmanager
def _workers(start: Callable[[], list[Any]]) -> Iterator[list[Any]]:
    workers = start()
    try:
        yield workers
    finally:
        stop(workers)


def _wait(marks: Marks, count: int, seconds: float, workers: list[Any]) -> int:
    """Until ``count`` executions were noted, or the time is up; how many it were."""
    end = time.perf_counter() + seconds
    while (done := marks.count()) < count and time.perf_counter() < end:
        if all(worker.poll() is not None for worker in workers):
            raise Stalled(f"the workers ended by themselves after {done} of {count} jobs")
        time.sleep(0.02)
    return done


def _warm(system: Any, marks: Marks, workers: list[Any], jobs: int = WARM_UP) -> int:
    """Pass jobs through, so that every process has started and imported; how many they were."""
    done = 0
    if hasattr(system, "enqueue_one"):
        for _ in range(WARM_UP):
            system.enqueue_one()
            time.sleep(0.02)
        done = WARM_UP
    done += _fill(system, max(jobs - done, 0), 30)
    if _wait(marks, done, 60, workers) < done:
        raise Stalled(f"only {marks.count()} of {done} warm-up jobs ran within 60 s")
    time.sleep(1)
    return done


def _here() -> Marks:
    return Marks(Path(os.environ["BENCH_TMP"]))


def drain(system: Any, options: Options) -> dict[str, float]:
    """Jobs per second from first to last execution; the backlog is there before the workers."""
    marks = _here()
    filled = _fill(system, options.jobs, options.budget)
    with _workers(system.start_workers) as workers:
        ran = _wait(marks, filled, options.budget, workers)
        settled = _wait_settled(system, options.budget) if ran >= filled else None
    starts = [start for _, start in marks.read()]
    if len(starts) < 2:
        raise Stalled(f"{len(starts)} of {filled} jobs ran within {options.budget} s")
    span = starts[-1] - starts[0]
    found = {"rate": (len(starts) - 1) / span, "ran": len(starts), "of": options.jobs}
    if settled:
        found["settled"] = len(starts) / (settled - starts[0])
    return found


def _wait_settled(system: Any, seconds: float) -> float | None:
    """When the store had the outcome of every job: later than the last start by what is batched."""
    if not hasattr(system, "unsettled"):
        return None
    end = time.time() + seconds
    while system.unsettled():
        if time.time() > end:
            raise Stalled(f"all jobs ran, but not all were settled within {seconds} s")
        time.sleep(0.002)
    return time.time()


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _lateness(marks: Marks, count: int) -> list[float]:
    """Milliseconds from stamp to start of the jobs that carried a stamp."""
    late = [(start - stamp) * 1000 for stamp, start in marks.read() if stamp]
    if len(late) < count:
        raise Stalled(f"only {len(late)} of {count} jobs ran in time")
    return late


def latency(system: Any, options: Options) -> dict[str, float]:
    """Milliseconds from just before the enqueueing call to the start of the task, at 50 jobs/s."""
    marks = _here()
    with _workers(system.start_workers) as workers:
        warm = _warm(system, marks, workers)
        if hasattr(system, "enqueue_one"):
            _pace(system.enqueue_one, options.latency_jobs)
        else:
            asyncio.get_event_loop().run_until_complete(_apace(system, options.latency_jobs))
        _wait(marks, warm + options.latency_jobs, 30, workers)
    late = _lateness(marks, options.latency_jobs)
    return {"p50": _percentile(late, 0.5), "p99": _percentile(late, 0.99)}


def _pace(one: Callable[[float], Any], count: int) -> None:
    start = time.perf_counter()
    for number in range(count):
        time.sleep(max(0.0, start + number / 50 - time.perf_counter()))
        one(time.time())


async def _apace(system: Any, count: int) -> None:
    start = time.perf_counter()
    for number in range(count):
        await asyncio.sleep(max(0.0, start + number / 50 - time.perf_counter()))
        await system.aenqueue_one(time.time())


def burst(system: Any, options: Options) -> dict[str, float]:
    """Lateness of many delayed jobs due at one instant."""
    return _delayed(system, options.burst, 5.0, lambda number: 0.0)


def alone(system: Any, options: Options) -> dict[str, float]:
    """Lateness of delayed jobs that come due one at a time, every 50 ms on average."""
    return _delayed(system, options.alone, 1.0, lambda number: number * 0.05 + 0.007 * (number % 3))


def _delayed(
    system: Any, count: int, lead: float, after: Callable[[int], float]
) -> dict[str, float]:
    enqueue_at = _need(system, "enqueue_at")
    start_workers = getattr(system, "start_workers_for_delays", system.start_workers)
    marks = _here()
    with _workers(start_workers) as workers:
        warm = _warm(system, marks, workers)
        due = time.time() + lead
        for number in range(count):
            enqueue_at(due + after(number))
        if time.time() > due and after(count) == 0:
            raise Stalled(f"enqueueing {count} delayed jobs took longer than {lead} s")
        _wait(marks, warm + count, lead + after(count) + 60, workers)
    late = _lateness(marks, count)
    early = sum(each < -1 for each in late)
    return {"p50": _percentile(late, 0.5), "p99": _percentile(late, 0.99), "early": early}


# Waiting


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            # With what its ended children used, so that restarts are not hidden.
            total += sum(process.cpu_times()[:4])
    return total


def idle(system: Any, options: Options) -> dict[str, float]:
    """After jobs: CPU in percent of a core, of the server too; memory (USS) of the workers."""
    marks = _here()
    server = int(os.environ.get("BENCH_SERVER_PID", "0"))
    with _workers(system.start_workers) as workers:
        _warm(system, marks, workers, jobs=min(options.jobs, 2_000))
        time.sleep(2)
        roots = [worker.pid for worker in workers] + ([server] if server else [])
        before = _cpu_seconds(tree(roots))
        start = time.perf_counter()
        time.sleep(options.idle)
        used = _cpu_seconds(tree(roots)) - before
        percent = 100 * used / (time.perf_counter() - start)
        memory = [each.memory_full_info() for each in tree(worker.pid for worker in workers)]
    sizes = [each.uss for each in memory]
    shares = {"pss": sum(each.pss for each in memory) / 1e6} if hasattr(memory[0], "pss") else {}
    return shares | {
        "cpu": percent,
        "uss": sum(sizes) / 1e6,
        "largest": max(sizes) / 1e6,
        "processes": len(sizes),
    }


MEASURES: dict[str, Callable[[Any, Options], dict[str, float]]] = {
    "single": single,
    "bulk": bulk,
    "async": concurrent,
    "threads": threads,
    "drain": drain,
    "latency": latency,
    "burst": burst,
    "alone": alone,
    "idle": idle,
}
