"""Code of the app that runs around its tasks may raise anything: no thread of the pool ends."""

from __future__ import annotations

import pytest
from harness import PATIENT, Place, eventually

from tidemill.core.job import State

APP = """
import builtins, logging, warnings

def raising(name):
    return getattr(builtins, name)("from the app")

KINDS = ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "MemoryError", "RecursionError",
         "StopIteration", "BaseException")

class Unprintable(Exception):
    def __str__(self): raise SystemExit("no text")
    __repr__ = __str__

class Half(Retry):
    def __init__(self): pass  # it has no delay

class Unpackable(dict):
    def items(self): raise SystemExit("no items")
    __iter__ = keys = values = items

class Finalized:
    def __del__(self): raise SystemExit("at the very end")

@dataclasses.dataclass
class Checked:
    n: int
    def __post_init__(self): raise SystemExit("no such value")

def fail(*_, **__): raise SystemExit("from a hook")

class Filter(logging.Filter):
    def filter(self, record): raise SystemExit("from a filter")

class Handler(logging.Handler):
    def handle(self, record): raise KeyboardInterrupt("from a handler")

def misdeeds():
    for kind in KINDS:
        yield kind, lambda kind=kind: fail_with(raising(kind))
    for name in ("Unprintable", "Half"):
        yield name, lambda error=globals()[name]: fail_with(error())
    yield "result", Unpackable
    yield "finalizer", lambda: setattr(Finalized(), "me", 1)
    yield "hooks", lambda: [setattr(sys, name, fail) for name in ("excepthook", "unraisablehook")]
    yield "warnings", lambda: warnings.simplefilter("error")
    yield "filter", lambda: logging.getLogger("tidemill.worker").addFilter(Filter())
    yield "logged", lambda: fail_with(ValueError("after the filter"))
    yield "handler", handler
    yield "logged again", lambda: fail_with(ValueError("after the handler"))

def fail_with(error): raise error

def handler():
    logger = logging.getLogger("tidemill.worker")
    logger.filters.clear()
    logger.addHandler(Handler())

NAMES = [name for name, _ in misdeeds()]

@mill.task(retries=0)
def does(name): return dict(misdeeds())[name]()

@mill.task(retries=0)
async def adoes(name): return dict(misdeeds())[name]()

@mill.task(retries=0)
def takes(value: Checked): return value

def late(signum, frame): raise TimeoutError("long after the task")

@mill.task(retries=0)
def sets_alarm():
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.02)

@mill.task(retries=0, timeout=0.5)
def loops():
    while True: time.sleep(0.01)

@mill.task
def together(count):
    note("in", os.getpid())
    while open(HERE + "/ledger").read().count("in ") < count:
        time.sleep(0.01)
    return os.getpid()

@mill.task
async def atogether(count):
    note("in", os.getpid())
    while open(HERE + "/ledger").read().count("in ") < count:
        await asyncio.sleep(0.01)
    return os.getpid()
"""

POOLS = pytest.mark.parametrize("slots", [1, 4], ids=["main", "threads"])


def check_all_slots(place: Place, slots: int) -> None:
    """All slots run jobs at a time, sync and async, in the one process that was there before."""
    (pid,) = [process.pid for worker in place.workers for process in worker.children()]
    seen = 0
    for name in ("together", "atogether"):
        seen += slots
        jobs = [place.enqueue(name, seen) for _ in range(slots)]
        assert {job.result(60) for job in jobs} == {pid}


@pytest.mark.everyday
@POOLS
@pytest.mark.parametrize("name", ["does", "adoes"])
def test_errors_of_user_code_end_no_thread(place: Place, name: str, slots: int) -> None:
    # Given a worker; when user code around tasks raises all there is to raise.
    place.write(APP)
    worker = place.worker(slots=slots).wait_ready()
    eventually(worker.children, "the process")
    before = [child.pid for child in worker.children()]
    records = {}
    for each in place.module.NAMES:
        (records[each],) = place.finish([place.enqueue(name, each)])
    # Then each job has its own outcome, after one attempt.
    for each, record in records.items():
        assert record.attempt == 1, each
        fine = each in ("finalizer", "hooks", "warnings", "handler", "filter")
        assert record.state is (State.SUCCEEDED if fine else State.FAILED), (each, record)
    for kind in place.module.KINDS:
        said = "RuntimeError" if (kind, name) == ("StopIteration", "adoes") else kind
        assert said in records[kind].error
    assert "<its message cannot be printed: SystemExit>" in records["Unprintable"].error
    assert "its result cannot be kept" in records["result"].error
    # And all slots of the same process serve on.
    check_all_slots(place, slots)
    assert [child.pid for child in worker.children()] == before
    assert worker.stop() == 0


@POOLS
def test_late_errors_end_no_thread(place: Place, slots: int) -> None:
    # Given tasks that leave an alarm and a bad value behind.
    place.write(APP)
    worker = place.worker(slots=slots, env=PATIENT).wait_ready()
    jobs = [place.enqueue("sets_alarm"), place.enqueue("takes", {"n": 1})]
    # When these raise while no task runs.
    place.finish(jobs)
    assert "no such value" in jobs[-1].refresh().error
    # Then later timeouts interrupt as ever, and all slots serve on.
    (record,) = place.finish([place.enqueue("loops")])
    assert "JobTimeout" in record.error
    check_all_slots(place, slots)
    assert worker.stop() == 0


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "OSError"])
@POOLS
def test_middleware_and_imports_may_raise_anything(place: Place, kind: str, slots: int) -> None:
    # Given middleware that raises around some tasks, and a module that cannot be imported.
    place.write(
        f"""
        def middleware(call_next, context):
            if context.task.endswith("early"): raise {kind}("early")
            value = call_next()
            if context.task.endswith("late"): raise {kind}("late")
            return value

        mill.middleware = [middleware]

        @mill.task(retries=0)
        def early(): pass
        @mill.task(retries=0)
        def late(): pass
        @mill.task(retries=0)
        async def aearly(): pass
        @mill.task(retries=0)
        async def alate(): pass
        @mill.task
        def fine(): return os.getpid()
        """,
        allow_imports=["*"],
    )
    (place.path / "broken.py").write_text(f"raise {kind}('from the module')\n")
    worker = place.worker(slots=slots).wait_ready()
    before = place.enqueue("fine").result(60)
    jobs = [place.enqueue(name) for name in ("early", "late", "aearly", "alate")]
    jobs.append(place.mill.enqueue("broken.function"))
    # When these jobs run; then each fails with the reason, and the same process serves on.
    for record in place.finish(jobs):
        assert record.state is State.FAILED
        assert kind in record.error
    assert {place.enqueue("fine").result(60) for _ in range(2 * slots)} == {before}
    assert worker.stop() == 0
