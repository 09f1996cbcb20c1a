"""What tasks are and do in a real worker: kinds, results, errors, retries, middleware, signing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Place, open_place

from tidemill import Tidemill
from tidemill.core.clock import clock, new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import State
from tidemill.errors import ResultNotKept

pytestmark = pytest.mark.everyday

S = State


def test_unknown_task_and_surplus_argument(place: Place) -> None:  # case T2
    place.write(
        """
        @mill.task
        def one(a): return a
        @mill.task
        async def aone(a): return a
        @mill.task
        def typed(n: int, p: Tidemill | None = None): return n
        """
    )
    place.worker()
    unknown, *surplus = (
        place.mill.enqueue(place.task("nowhere")),
        place.mill.enqueue(place.task("one"), 1, 2),
        place.mill.enqueue(place.task("aone"), 1, 2),
    )
    fine = place.enqueue("one", 1)
    for record in place.finish(surplus):
        assert record.state is S.FAILED
        assert "the arguments do not fit the task" in record.error
        assert record.attempt == 1
    assert fine.result(30) == 1
    record = place.mill.broker.get(unknown.id)
    assert "no worker knows task" in record.error
    assert record.attempt == 0


@pytest.mark.parametrize("slots", [1, 4])
def test_a_snooze_is_no_attempt_however_the_job_runs(place: Place, slots: int) -> None:
    """In the main thread (one slot), in threads, in the event loop; ``expires`` bounds it."""
    place.write(
        """
        def come_back():
            begin()
            runs = sum(this_job().id in line for line in open(HERE + "/ledger"))
            if runs < 6:
                raise Snooze(0.02)
            return runs
        @mill.task(retries=0)
        def in_thread(): return come_back()
        @mill.task(retries=0)
        async def in_loop(): return come_back()
        @mill.task(retries=0, expires=0.5)
        def never(): raise Snooze(0.02)
        """
    )
    place.worker(slots=slots).wait_ready()
    one, two, three = (place.enqueue(name) for name in ("in_thread", "in_loop", "never"))
    for record in place.finish([one, two]):
        assert record.state is S.SUCCEEDED, record.error
        assert (record.attempt, len(record.attempts)) == (1, 1)
    (late,) = place.finish([three])
    assert (late.state, late.attempt) == (S.EXPIRED, 0)


def test_signatures(place: Place) -> None:  # case T15, law 18
    place.write(
        """
        @mill.task
        def quietly(*args): note("ran", *args)
        """,
        secret_keys=["new", "old"],
    )
    name = place.task("quietly")

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {place.path}/exploded",)

    old = Tidemill(place.url, secret_keys=["old"], allow_imports=["*"])
    stranger = Tidemill(place.url, secret_keys=["stolen"], allow_imports=["*"])
    rotated, forged = old.enqueue(name, 1), stranger.enqueue(name, 2)
    unsigned = place.mill.enqueue(name, 3)
    body, now = pickle.dumps([[Bomb()], {}]), clock.wall()
    bomb = Envelope(id=new_id(), task=name, body=body, pickled=True, created=now)
    place.mill.broker.put([bomb])
    place.worker()
    ok, *bad = place.finish([rotated, forged, unsigned, place.mill.job(bomb.id)])
    assert ok.state is S.SUCCEEDED
    for record in bad:
        assert record.state is S.FAILED
        assert "bad signature" in record.error
    assert place.notes() == ["ran 1"]
    assert not (place.path / "exploded").exists()
    old.close()
    stranger.close()


def test_values_that_cannot_be_printed_or_kept_fail_their_job_alone(
    place: Place,
) -> None:  # case T20
    place.write(
        """
        class Mute(Exception):
            def __str__(self): raise RuntimeError("no")
            def __repr__(self): raise RuntimeError("no")
        class Rude(Exception):
            def __str__(self): raise SystemExit(3)
        class Odd:
            def __iter__(self): raise RuntimeError("no")
        @dataclasses.dataclass
        class Half:
            a: int
        @mill.task(retries=0)
        def mute(): raise Mute(lambda: 1)
        @mill.task(retries=0)
        def rude(): raise Rude
        @mill.task(retries=0)
        def leaves(): sys.exit(3)
        @mill.task
        def odd(): return Odd()
        @mill.task
        def half():
            value = Half(1)
            del value.a
            return value
        @mill.task
        def surrogate(): return "\\ud800"
        @mill.task(retries=0)
        def long(): raise ValueError("x" * 5_000_000 + "\\ud800")
        @mill.task
        def fine(): return 1
        """
    )
    worker = place.worker(slots=2).wait_ready()
    names = ["mute", "rude", "leaves", "odd", "half", "surrogate", "long"]
    jobs = [place.enqueue(name) for name in names]
    reasons = {}
    for name, record in zip(names, place.finish(jobs), strict=True):
        assert record.state is S.FAILED, name
        assert record.attempt == 1
        assert len(record.error) <= 2000
        reasons[name] = record.error
    assert "cannot be printed" in reasons["mute"]
    assert "cannot be printed" in reasons["rude"]
    assert "SystemExit: 3" in reasons["leaves"]
    for name in ("odd", "half", "surrogate"):
        assert "its result cannot be kept" in reasons[name]
    assert [place.enqueue("fine").result(30) for _ in range(3)] == [1, 1, 1]
    assert len(worker.children()) == 1
    assert worker.stop() == 0


@pytest.mark.parametrize("slots", [1, 4], ids=["main", "threads"])
def test_context_is_the_jobs_own(place: Place, slots: int) -> None:  # case T19
    place.write(
        """
        import contextvars, logging
        var = contextvars.ContextVar("var", default="clean")
        log = logging.getLogger("app")

        def look():
            seen = var.get()
            var.set(this_job().id)
            log.warning("here is %s", this_job().id)
            return [seen, this_job().id, threading.current_thread() is threading.main_thread()]

        @mill.task
        def sync():
            first = look()
            time.sleep(0.01)
            return [*first, var.get(), this_job().id]

        @mill.task
        async def coro():
            first = look()
            await asyncio.sleep(0.01)
            return [*first, var.get(), await asyncio.to_thread(lambda: this_job().id)]
        """
    )
    worker = place.worker(slots=slots)
    jobs = [place.enqueue(("sync", "coro")[i % 2]) for i in range(12)]
    place.finish(jobs)
    for i, job in enumerate(jobs):
        in_main = slots == 1 and i % 2 == 0
        assert job.result() == ["clean", job.id, in_main, job.id, job.id]
        assert f"here is {job.id}" in worker.output


def test_imports_that_break(place: Place) -> None:
    place.write("", allow_imports=["bad_*"])
    (place.path / "bad_value.py").write_text("raise ValueError('at import')")
    (place.path / "bad_exit.py").write_text("raise SystemExit(7)")
    worker = place.worker().wait_ready()
    jobs = [place.mill.enqueue("bad_value.f"), place.mill.enqueue("bad_exit.f")]
    for record in place.finish(jobs):
        assert record.state is S.FAILED
        assert "cannot be imported" in record.error
    assert len(worker.children()) == 1


def test_a_users_module_may_have_the_name_of_one_of_pythons(place: Place) -> None:
    place.write("@mill.task\ndef fine(): return 1")
    (place.path / "queue.py").write_text("raise ImportError('not the standard library')")
    job = place.enqueue("fine")
    command = [Path(sys.executable).with_name("tidemill"), "worker", f"{place.app}:mill"]
    done = subprocess.run(
        [*command, "-p", "1", "--burst"], cwd=place.path, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    assert job.result(0) == 1


def test_one_bad_job_takes_nobody_with_it(place: Place) -> None:  # law 16
    place.write(
        r"""
        @mill.task(retries=0)
        def odd_name():
            this_job().log("caf\udce9.txt")
            raise Snooze(0.05, "\udce9") if this_job().attempt == 0 else Fail("\udce9")
        @mill.task(retries=0)
        def nanoseconds(): raise Retry(delay=5e18)
        @mill.task(retries=0)
        def sleeps(): time.sleep(0.5); return "slept"
        """
    )
    worker = place.worker(slots=4).wait_ready()
    neighbour = place.enqueue("sleeps")
    odd, late = place.finish([place.enqueue("odd_name"), place.enqueue("nanoseconds")])
    assert odd.log[0][1] == r"caf\udce9.txt"
    assert odd.error == r"Fail: \udce9"
    assert "delay of Retry" in late.error
    assert neighbour.result(20) == "slept"
    assert len(worker.children()) == 1


def test_a_result_that_finds_no_room_is_dropped_alone(tmp_path: Path) -> None:  # law 16
    (tmp_path / "small").mkdir()
    with open_place(tmp_path / "small", f"lmdb://{tmp_path}/store?map_size=4194304") as place:
        place.write(
            """
            @mill.task(retries=0)
            def huge(): time.sleep(0.2); return "x" * 6_000_000
            @mill.task(retries=0)
            def small(): time.sleep(0.2); return 1
            """
        )
        place.worker(slots=4).wait_ready()
        jobs = huge, small = [place.enqueue("huge"), place.enqueue("small")]
        assert [record.state for record in place.finish(jobs)] == [S.SUCCEEDED] * 2
        assert small.result() == 1
        with pytest.raises(ResultNotKept):
            huge.result()
