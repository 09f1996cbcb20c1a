"""The time of each page of the dashboard, on a store with many jobs that workers ran.

    python benchmarks/dashboard.py fill FOLDER [JOBS]
    python benchmarks/dashboard.py pages FOLDER [ROUNDS]

``fill`` puts JOBS mixed jobs (1,000,000 unless told) into an LMDB store in FOLDER, and lets workers
at the lowest priority run what is due. It takes minutes; stop it and call it again to go on.
``pages`` opens each page, and searches, ROUNDS times (20 unless told), in this process. It prints
the median of the processor time, without anything that an earlier request left in a cache, and
then of the same request once more, as a second viewer sends it. Other work on the machine disturbs
processor time less than the clock on the wall, but does disturb it. Searches give up after some
time on the wall; here they give up after as much processor time, as on an idle machine.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from tidemill import Fail, Limit, Retries, Retry, Tidemill, chain, group, this_job
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.job import GROUP, State
from tidemill.dashboard import bulk, failures, job_search
from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.roles import User

FOLDER = os.environ.get("TIDEMILL_BENCH_FOLDER", "")
JOBS = 1_000_000
AT_ONCE = 2_000
WEEK = 7 * 86_400.0

mill = Tidemill(
    f"lmdb://{FOLDER}/store?keep=31536000&keep_count=10000000&map_size=34359738368"
    if FOLDER
    else "memory://"
)


@mill.task(name="shop.pay", queue="shop", retries=Retries(2, delay=0.01))
def pay(order: int, customer: str) -> int:
    """Fail for one order of 50, and retry one of 20."""
    if order % 50 == 0:
        raise Fail(f"the bank refused order {order} of {customer}")
    if order % 20 == 1 and this_job().attempt == 1:
        raise Retry(delay=0.01)
    return order


@mill.task(name="mail.send", queue="mail", retries=0)
def send(letter: int, address: str) -> None:
    """Fail for one letter of 100, with one of three errors."""
    if letter % 100 == 0:
        raise [ConnectionError, TimeoutError, OSError][letter // 100 % 3](f"no answer to {letter}")


@mill.task(name="image.resize", queue="images", limit=Limit(concurrency=8, name="gpu"))
def resize(path: str, width: int) -> str:
    """Succeed."""
    return f"{path}-{width}"


@mill.task(name="report.build", queue="reports")
def report(month: int) -> int:
    """Succeed."""
    return month


def calls(first: int, count: int) -> list[object]:
    """Calls of all kinds: most run, some are due in a week, some have no worker."""
    chance = random.Random(first)
    made: list[object] = []
    for n in range(first, first + count):
        kind = chance.random()
        if kind < 0.45:
            call = pay.call(n, f"customer-{n % 977}").using(key=f"order-{n}")
        elif kind < 0.75:
            call = send.call(n, f"user{n % 5003}@example.org").using(tags=[f"campaign-{n % 20}"])
        elif kind < 0.92:
            call = resize.call(f"/photos/{n}.jpg", chance.choice([64, 640, 1920]))
        elif kind < 0.97:
            call = report.call(n % 12).using(delay=WEEK)
        else:
            call = report.call(n % 12)
        made.append(call)
    return made


def fill(jobs: int) -> None:
    """Put the jobs that are missing, and run what is due."""
    there = sum(row.accepted for row in mill.queues())
    workers = [start_worker() for _ in range(2)]
    try:
        while there < jobs:
            mill.enqueue_many(calls(there, min(AT_ONCE, jobs - there)))
            there += AT_ONCE
            while ready() > 100_000:
                time.sleep(1)
        mill.schedules.add("nightly", report.call(1), "0 3 * * *")
        for n in range(20):
            mill.enqueue(chain(group([resize.call(f"/a/{n}", w) for w in range(5)]), report))
        cancelled = [one.id for one in itertools.islice(mill.jobs(state="scheduled"), 5_000)]
        mill.broker.cancel(cancelled)
        while ready():
            time.sleep(1)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


def ready() -> int:
    """Jobs that a worker may start, without those of a limit: some of them stay."""
    return sum(row.ready for row in mill.queues() if row.name in ("shop", "mail"))


def start_worker() -> subprocess.Popen[bytes]:
    """A worker of all queues but one, at the lowest priority."""
    queues = "shop,mail,images"
    command = ["nice", "-n", "19", sys.executable, "-m", "tidemill", "worker", "dashboard:mill"]
    command += ["-p", "1", "-c", "8", "-Q", queues, "--release", "2026.1"]
    return subprocess.Popen(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL)


def paths() -> list[str]:
    """The pages and searches to measure."""
    found = {state: first(Filter(states=frozenset({state}))) for state in State}
    job = found[State.FAILED]
    whole = first(Filter(task=GROUP))
    pages = [
        *("/", "/?over=24h", "/?over=7d", "/queues", "/queues/shop", "/queues/shop?over=7d"),
        *("/failed", "/failed?over=7d", "/tasks", "/tasks?over=7d", "/tasks/shop.pay"),
        *("/tasks/mail.send?over=7d", "/schedules", "/schedules/nightly", "/flows", "/limits"),
        *("/workers", "/bulk", "/audit", "/settings", "/help"),
        *(f"/jobs/{job}", f"/jobs/{job}/edit", f"/jobs/{job}/file", f"/flows/{whole}"),
    ]
    searches = [
        *("", *(f"state:{state}" for state in State), "queue:shop", "task:mail.send"),
        *("state:failed task:shop.pay", "state:failed queue:mail error:Timeout", "tag:campaign-7"),
        *("customer-17", "customer-nobody", "key:order-4711", f"id:{job[:10]}", f"id:*{job[-6:]}"),
        *("state:failed failure:0", "task:nothing", "tag:nothing", "state:cancelled"),
        *("state:succeeded task:report.build", "group:nothing", "failure:0123456789abcdef"),
        *(job, job[-8:], "0123456789"),
    ]
    previews = ["state:failed", "task:shop.pay", "customer-17"]
    return [
        *pages,
        *(f"/jobs?q={text.replace(' ', '+')}" for text in dict.fromkeys(searches)),
        *(f"/bulk/new?act=retry&q={text}" for text in previews),
    ]


def first(what: Filter) -> str:
    """The id of the newest job that matches."""
    found = mill.broker.find(what, 1).records
    return found[0].envelope.id if found else "none"


def measure(rounds: int) -> None:
    """Print the times of all pages, the slowest first."""
    dashboard = Dashboard(mill)
    for module in (bulk, failures, job_search):  # their patience, as on an idle machine
        module.time = SimpleNamespace(time=time.time, monotonic=time.process_time)
    rows = []
    for path in paths():
        alone, again, statuses = [], [], set()
        for _ in range(rounds):
            dashboard.cache.clear()
            dashboard.looks.forget()
            for times in (alone, again):
                before = time.process_time()
                statuses.add(visit(dashboard, path))
                times.append(1000 * (time.process_time() - before))
        rows.append((statistics.median(alone), statistics.median(again), path, statuses))
    print(
        f"{sum(row.size for row in mill.queues()):,} unfinished of {mill.broker.info()['jobs']:,}"
    )
    print(f"{'alone ms':>9} {'again ms':>9}  page")
    for one, other, path, statuses in sorted(rows, reverse=True):
        note = "" if statuses <= {200, 303} else f"  {statuses}"
        print(f"{one:9.1f} {other:9.1f}  {path}{note}")


def visit(dashboard: Dashboard, path: str) -> int:
    """Open a page in full, and return its status."""
    where, _, query = path.partition("?")
    scope = {"type": "http", "method": "GET", "path": where, "query_string": query.encode()}
    return dashboard.handle(scope | {"headers": []}, User("anna")).status_code


def main(what: str, folder: str, count: int = 0) -> None:
    """Fill a store, or measure pages, in a process that knows the folder."""
    path = str(Path(folder).resolve())
    if path != FOLDER:
        os.environ["TIDEMILL_BENCH_FOLDER"] = path
        os.execv(sys.executable, [sys.executable, *sys.argv])
    (fill if what == "fill" else measure)(count or (JOBS if what == "fill" else 20))
    mill.close()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("fill", "pages"):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
