"""The app of a storm: tasks of all kinds, and a producer that notes what was accepted, and when.

``STORM_LACKS`` names a task that a worker does not know. ``STORM_PAUSE`` is how many seconds a
producer rests after each put.
"""

from __future__ import annotations

TIMEOUT = 0.2
"""Seconds that ``hangs`` and ``spins`` may run."""

APP = """
from tidemill import Limit, TidemillError

forever = Retries(1000, delay=0)
keeps = not mill.url.startswith("amqp")  # jobs that are done, schedules, limits
each = {"limit": Limit(concurrency=2, key=lambda n: n % 3)} if keeps else {}
pause = float(os.environ.get("STORM_PAUSE", "0.04"))
seldom = max(4, round(0.8 / pause))

@mill.task(queue="slow", retries=forever, **each)
def bounded(n):
    begin(); time.sleep(0.02); end()

@mill.task(queue="quick", retries=forever)
def quick(n): begin(); end()

@mill.task(queue="quick", retries=forever)
def beat(): begin(); end()

if keeps:
    mill.schedule("beat", beat.call(), every=0.2, catch_up=True)

@mill.task(queue="slow", retries=forever)
def slow(n):
    begin(); time.sleep(0.02 * (n % 10)); end()

@mill.task(queue="async", retries=forever)
async def later(n):
    begin(); await asyncio.sleep(0.01 * (n % 10)); end()

@mill.task(queue="slow", retries=forever)
def holds(n):
    begin(); hold_gil(0.15); end()

@mill.task(queue="slow", retries=Retries(2, delay=0), timeout=0.2)
def hangs(n):
    begin()
    try:
        time.sleep(20 if n % 2 else 0.1)
    finally:
        end()

@mill.task(queue="slow", retries=Retries(2, delay=0), timeout=0.2)
def spins(n):
    begin()
    try:
        until = time.time() + (20 if n % 2 else 0.1)
        while time.time() < until: pass
    finally:
        end()

def sometimes(function):
    # A task that some workers do not know, which give its jobs back.
    if keeps and os.environ.get("STORM_LACKS") == function.__name__:
        return function
    return mill.task(queue="quick", retries=forever)(function)

@sometimes
def rare(n): begin(); end()

@sometimes
def scarce(n): begin(); end()

@mill.task(queue="slow", retries=Retries(0))
def fails(): raise ValueError

def put(enqueue, sure):
    # Note when a put began and ended, and what it said; jobs after the first ``sure`` may fail.
    began = time.time()
    try:
        jobs = enqueue()
    except TidemillError as error:
        note("refused", began, time.time(), type(error).__name__)
        time.sleep(0.1)
        return
    ended, ids = time.time(), [job.id for job in jobs]
    note("accepted", began, ended, *ids[:sure])
    note("may-fail", began, ended, *ids[sure:])

def produce():
    n = 0
    while not os.path.exists(HERE + "/enough"):
        calls = [quick.call(n + i) for i in range(12)] + [slow.call(n + i) for i in range(4)]
        calls += [later.call(n + i) for i in range(4)]
        calls += [bounded.call(n + i) for i in range(3)]
        calls += [task.call(n + i) for task in (rare, scarce) for i in range(3)]
        if n % 5 == 0:
            calls += [holds.call(n)]
        stuck = [task.call(n // seldom) for task in (hangs, spins)] if n % seldom == 0 else []
        put(lambda: mill.enqueue_many(calls + stuck), len(calls))
        n += 1
        time.sleep(pause)
        put(lambda: [quick.enqueue(n)], 1)  # alone, it is handed to who sleeps
        time.sleep(pause)

if __name__ == "__main__":
    produce()
"""
