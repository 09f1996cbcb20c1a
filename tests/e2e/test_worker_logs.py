"""The log of a worker: its start, its jobs, its end, and the app's own logging."""

from __future__ import annotations

import datetime as dt
import json
import re
import signal
from typing import Any

import pytest
from harness import Place, eventually

from tidemill.core.job import State

TASKS = """
    import logging
    if "TIDEMILL_SUPERVISOR" in os.environ and os.path.exists("configure.py"):
        import configure
    shop = logging.getLogger("shop")

    @mill.task(queue="mail", retries=Retries(1, delay=0))
    def ends(how):
        shop.info("run %s", how, extra={"task": "mine", "queue": 7, "job_id": "x", "odd": object()})
        if how == "raises":
            raise ValueError("no such thing")
        if how == "fails":
            raise Fail("never")
        if how == "retries" and this_job().attempt == 1:
            raise Retry("later", delay=0)
        if how == "snoozes" and not os.path.exists(os.path.join(HERE, "snoozed")):
            open(os.path.join(HERE, "snoozed"), "w").close()
            raise Snooze(0.01)

    @mill.task
    async def async_one():
        await asyncio.gather(asyncio.to_thread(shop.info, "in a thread"), asyncio.sleep(0))
        shop.info("in async")

    @mill.task
    def holds():
        begin()
        time.sleep(600)
"""


def lines_of(output: str, *parts: str) -> list[str]:
    """The lines that have all parts."""
    return [line for line in output.splitlines() if all(part in line for part in parts)]


def records(output: str) -> list[dict[str, Any]]:
    """All lines, which must be JSON objects."""
    return [json.loads(line) for line in output.splitlines()]


def test_a_banner_tells_what_the_worker_serves(place: Place) -> None:
    place.write("\n".join(f"@mill.task(name='t{n:02}')\ndef t{n}(): pass" for n in range(32)))
    worker = place.worker("-Q", "high,low", slots=3, processes=2).wait_ready()
    assert worker.stop() == 0
    banner = worker.output[: worker.output.index("stops now")].splitlines()
    assert banner[0].startswith("tidemill worker ")
    assert banner[0].endswith(f"serves {place.app}:mill")
    told = "\n".join(banner)
    assert f"store   {place.mill.broker.url}" in told
    assert "queues  high, low (strict order)" in told
    assert "slots   2 x 3" in told
    assert "t29; and 2 more" in " ".join(told.split())
    assert "Ctrl-C finishes running jobs" in told
    # and nothing says it twice
    assert worker.output.count(" serves ") == 1


@pytest.mark.everyday
def test_each_run_has_one_line(place: Place) -> None:
    place.write(TASKS)
    worker = place.worker().wait_ready()
    hows = ["well", "raises", "fails", "retries", "snoozes"]
    jobs = {how: place.enqueue("ends", how) for how in hows}
    place.finish(jobs.values())
    assert worker.stop() == 0

    def told(how: str) -> list[str]:
        return [line.split("]", 1)[1] for line in lines_of(worker.output, f"[{jobs[how].id}]")]

    (well,) = told("well")
    assert re.match(r" succeeded in \d+\.\d+ s ", well)
    assert well.endswith(" s (queue mail, attempt 1)")
    again, last = told("raises")
    assert again.endswith("(queue mail, attempt 1 of 2): ValueError: no such thing; again in 0 s")
    assert last.endswith("(queue mail, attempt 2 of 2): ValueError: no such thing; not again")
    (never,) = told("fails")
    assert never.endswith("(queue mail, attempt 1 of 2): Fail: never; not again")
    later, well = told("retries")
    assert later.endswith("Retry: later; again in 0 s")
    assert well.startswith(" succeeded in ")
    snoozed, well = told("snoozes")
    assert snoozed.startswith(" snoozed after ")
    assert well.startswith(" succeeded in ")
    # a traceback for each attempt that raised, and for the failure, but none for Retry and Snooze
    assert worker.output.count("Traceback (most recent call last)") == 3
    assert lines_of(worker.output, "WARNING", "again in 0 s", jobs["raises"].id)
    assert lines_of(worker.output, "ERROR", "not again", jobs["raises"].id)


def test_many_jobs_share_a_line_a_second(place: Place) -> None:
    place.write("@mill.task\ndef quick(): pass")
    jobs = 3000
    place.mill.enqueue_many(place.mill.call(place.task("quick")) for _ in range(jobs))
    worker = place.worker(processes=2).wait_ready()
    eventually(lambda: not place.unfinished(), "the jobs", 120)
    # then lines and summaries count all jobs, also the last ones
    eventually(lambda: counted(worker.output) == jobs, "lines for all jobs")
    assert len(lines_of(worker.output, "quick[")) < jobs / 2
    # and each job has a line again after a second with few jobs
    place.enqueue("quick")
    eventually(lambda: counted(worker.output) == jobs + 1, "a line or a summary")
    one = place.enqueue("quick")
    worker.wait_line(f"[{one.id}] succeeded")
    assert worker.stop() == 0
    # and a worker that ends first tells of all jobs
    place.mill.enqueue_many(place.mill.call(place.task("quick")) for _ in range(1000))
    last = place.worker("--burst")
    assert last.wait() == 0
    assert counted(last.output) == 1000


def counted(output: str) -> int:
    """The jobs that the lines and the summaries tell of."""
    summaries = lines_of(output, " ended in the last second")
    numbers = [line.split("tidemill.worker: ")[1].split()[0] for line in summaries]
    return len(lines_of(output, "] succeeded in ")) + sum(int(n.replace(",", "")) for n in numbers)


@pytest.mark.everyday
def test_json_has_an_object_on_each_line(place: Place) -> None:
    place.write(TASKS)
    worker = place.worker("--log-format", "json").wait_ready()
    raises, runs = place.enqueue("ends", "raises"), place.enqueue("async_one")
    place.finish([raises, runs])
    assert worker.stop() == 0
    told = records(worker.output)
    start = told[0]
    assert (start["app"], start["order"]) == (f"{place.app}:mill", "fair")
    assert place.task("ends") in start["tasks"]
    for record in told:
        assert dt.datetime.fromisoformat(record["time"]).utcoffset() is not None
        assert {"level", "logger", "message", "pid"} <= record.keys()
    # the records of the task and of the worker name the job, whatever extras they have
    mine, failed, *_ = [record for record in told if record.get("job_id") == raises.id]
    job = {"job_id": raises.id, "task": place.task("ends"), "queue": "mail", "attempt": 1}
    for record in (mine, failed):
        assert {name: record[name] for name in job} == job
    assert (mine["logger"], mine["message"]) == ("shop", "run raises")
    assert (mine["task_"], mine["queue_"], mine["job_id_"]) == ("mine", 7, "x")
    assert "odd" not in mine
    assert failed["level"] == "WARNING"
    assert failed["exception"].endswith("ValueError: no such thing")
    assert "Traceback" not in failed["message"]
    for message in ("in async", "in a thread"):
        (record,) = [record for record in told if record["message"] == message]
        assert record["job_id"] == runs.id


def test_the_environment_sets_level_and_format(place: Place) -> None:
    place.write(TASKS)
    env = {"TIDEMILL_LOG": "DEBUG", "TIDEMILL_LOG_FORMAT": "json"}
    worker = place.worker(env=env).wait_ready()
    place.finish([place.enqueue("ends", "well")])
    assert worker.stop() == 0
    told = [record for record in records(worker.output) if "] started " in record["message"]]
    assert [record["level"] for record in told] == ["DEBUG"]
    # and options go before it
    other = place.worker("-v", env={"TIDEMILL_LOG": "ERROR"}).wait_ready()
    place.finish([place.enqueue("ends", "well")])
    assert other.stop() == 0
    assert lines_of(other.output, "DEBUG", "] started (queue mail, attempt 1)")
    bad = place.worker(env={"TIDEMILL_LOG": "loud"})
    assert bad.wait() == 2
    assert "'loud' is not one of 'debug', 'info'" in bad.output


BASIC = """
import logging
logging.basicConfig(level=logging.INFO, format="APP %(levelname)s %(name)s %(message)s")
"""
DICT = """
import logging.config
logging.config.dictConfig({
    "version": 1,
    "formatters": {"app": {
        "format": "APP %(levelname)s %(name)s %(message)s (%(tidemill_job_id)s)",
    }},
    "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "app"}},
    "root": {"handlers": ["err"], "level": "INFO"},
})
logging.getLogger("shop").info("imported")
"""


def write(place: Place, configure: str) -> None:
    """Write the app, and the module by which it configures logging in worker processes."""
    (place.path / "configure.py").write_text(configure)
    place.write(TASKS)


@pytest.mark.parametrize("configure", [BASIC, DICT], ids=["basicConfig", "dictConfig"])
def test_the_logging_of_the_app_wins(place: Place, configure: str) -> None:
    # given an app that configures logging
    write(place, configure)
    worker = place.worker().wait_ready()
    old = place.enqueue("ends", "well")
    place.finish([old])
    # when the app is reloaded, too
    (before,) = worker.children()
    worker.send(signal.SIGHUP)
    eventually(lambda: before.pid not in [child.pid for child in worker.children()], "a reload")
    new = place.enqueue("ends", "raises")
    place.finish([new])
    assert worker.stop() == 0
    # then all lines of the worker processes go through the app's handler, once
    for job, what in ((old, "] succeeded in"), (new, "; again in"), (new, "; not again")):
        (line,) = lines_of(worker.output, job.id, what)
        assert line.startswith("APP ")
    assert all(line.startswith("APP INFO shop") for line in lines_of(worker.output, "run well"))
    if configure is DICT:
        assert lines_of(worker.output, f"APP INFO shop run well ({old.id})")
        assert lines_of(worker.output, "APP INFO shop imported ()")
    assert "Logging error" not in worker.output


def test_the_levels_of_the_app_count_unless_a_level_is_given(place: Place) -> None:
    own = 'logging.getLogger("tidemill").setLevel(logging.WARNING)'
    write(place, BASIC.replace("logging.INFO", "logging.WARNING") + own)
    for options, told in (([], False), (["--log-level", "info"], True)):
        worker = place.worker(*options).wait_ready()
        job = place.enqueue("ends", "well")
        place.finish([job])
        assert worker.stop() == 0
        assert bool(lines_of(worker.output, "APP INFO tidemill.worker", job.id)) is told
        assert "run well" not in worker.output


RAISING = {
    "handler": """
class Bad(logging.Handler):
    def handle(self, record): raise RuntimeError("in a handler")
logging.getLogger().addHandler(Bad())
""",
    "filter": """
class Bad(logging.Filter):
    def filter(self, record): raise RuntimeError("in a filter")
logging.getLogger("tidemill.worker").addFilter(Bad())
""",
    "factory": """
def bad(*args, **kwargs): raise RuntimeError("in a factory")
logging.setLogRecordFactory(bad)
""",
}


@pytest.mark.everyday
@pytest.mark.parametrize("what", RAISING)
def test_logging_that_raises_ends_no_worker_process(place: Place, what: str) -> None:
    (place.path / "configure.py").write_text(f"import logging\n{RAISING[what]}")
    place.write(
        """
        if "TIDEMILL_SUPERVISOR" in os.environ:
            import configure

        @mill.task(retries=0)
        def fails(): raise ValueError("no such thing")

        @mill.task
        def works(): return 1
        """
    )
    worker = place.worker("--log-level", "info").wait_ready()
    (process,) = worker.children()
    fails, works = place.enqueue("fails"), place.enqueue("works")
    bad, good = place.finish([fails, works])
    assert (bad.state, good.state) == (State.FAILED, State.SUCCEEDED)
    assert [child.pid for child in worker.children()] == [process.pid]
    assert worker.stop() == 0
    # and the lines are not lost
    assert f"[{works.id}] succeeded in" in worker.output
    assert "ValueError: no such thing" in worker.output
    assert "Traceback (most recent call last)" in worker.output
