"""``as_completed``: handles in the order in which their jobs end; and the bar beside it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import eventually

from tidemill import (
    InvalidOption,
    Job,
    JobNotFound,
    ResultTimeout,
    State,
    Tidemill,
    TidemillError,
    as_completed,
    chain,
    group,
    map_many,
)
from tidemill.client import job_handle as completed_module
from tidemill.errors import JobPruned
from tidemill.testing import run_all, worker

MillMaker = Callable[..., Tidemill]


class Gates:
    """A task each of whose jobs ends when its gate is opened."""

    def __init__(self, mill: Tidemill) -> None:
        self.gates = [threading.Event() for _ in range(6)]

        @mill.task(name="pass", retries=0)
        def go(number: int) -> int:
            assert self.gates[number].wait(60)
            if number == 5:
                raise ValueError("no")
            return number

        self.go = go

    def open(self, number: int) -> None:
        self.gates[number].set()


@pytest.fixture
def gates(mill: Tidemill) -> Gates:
    return Gates(mill)


def count_looks(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait for the store was to be."""
    looks: list[float] = []
    wait_for = mill.broker.wait_for

    def counted(ids: Any, timeout: float, **how: Any) -> Any:
        looks.append(timeout)
        return wait_for(ids, timeout, **how)

    monkeypatch.setattr(mill.broker, "wait_for", counted)
    return looks


@pytest.mark.parametrize("grouped", [True, False])
def test_each_comes_when_it_ends_and_nobody_polls(
    mill: Tidemill, gates: Gates, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    with worker(mill, concurrency=6):
        calls = [gates.go.call(number) for number in range(6)]
        jobs: Any = mill.enqueue(group(calls)) if grouped else mill.enqueue_many(calls)
        looks = count_looks(mill, monkeypatch)
        found = []
        ended = iter(as_completed(jobs, timeout=60))
        for number in (3, 5, 0, 4, 1, 2):
            gates.open(number)
            job = next(ended)
            found.append(job.state)
            assert job.state is State.FAILED if number == 5 else job.result(0) == number
        assert next(ended, None) is None
    assert found.count(State.FAILED) == 1
    waits = [seconds for seconds in looks if seconds]
    assert len(waits) == 6
    assert min(waits) > 20


def test_the_same_with_async_for(mill: Tidemill, gates: Gates) -> None:
    async def main() -> None:
        handle = mill.enqueue(map_many(gates.go, range(3)))
        found = []
        gates.open(2)
        async for job in as_completed(handle, timeout=30):
            found.append(await job)
            gates.open(found[-1] - 1)
        assert found == [2, 1, 0]
        assert [job.id async for job in as_completed([])] == []
        late = aiter(as_completed([gates.go.using(delay=600).enqueue(1)], timeout=0.05))
        with pytest.raises(ResultTimeout, match="1 job has not ended"):
            await anext(late)

    with worker(mill, concurrency=6):
        asyncio.run(main())


def test_handles_of_all_kinds_are_given_back(mill: Tidemill) -> None:
    inc = mill.task(name="inc")(inc_one)
    handles: list[Any] = [
        inc.enqueue(1),
        mill.enqueue(chain(inc.call(1), inc)),
        mill.enqueue(group([inc.call(1), inc.call(2)])),
        inc.using(key="k").enqueue(5),
        inc.using(key="k").enqueue(5),
    ]
    run_all(mill)
    found = list(as_completed(handles, timeout=5))
    assert [id(handle) for handle in found] == [id(handle) for handle in handles]
    assert [handle.result(0) for handle in found] == [2, 3, [2, 3], 6, 6]


def test_deleted_and_unknown_jobs_count_as_ended(mill: Tidemill) -> None:
    inc = mill.task(name="inc")(inc_one)
    gone = inc.enqueue(1)
    gone.delete()
    assert list(as_completed([gone, mill.job("never")], timeout=0)) == [gone, mill.job("never")]


def test_handles_that_cannot_be_waited_for_are_refused(
    mill: Tidemill, make_mill: MillMaker
) -> None:
    with pytest.raises(InvalidOption, match="takes handles of jobs, not 'x'"):
        as_completed(["x"])
    with pytest.raises(InvalidOption, match="of one app"):
        as_completed([mill.job("a"), make_mill(at="other").job("b")])
    with pytest.raises(InvalidOption, match="timeout"):
        as_completed([mill.job("a")], timeout=-1)
    with mill.batch(), pytest.raises(TidemillError, match="inside a batch"):
        list(as_completed([mill.job("a")]))
    assert list(as_completed([])) == []


def test_with_sync_all_is_over(make_mill: MillMaker) -> None:
    mill = make_mill(sync=True)
    inc = mill.task(name="inc")(inc_one)
    handle = mill.enqueue(map_many(inc, range(3)))
    assert [job.result() for job in as_completed(handle)] == [1, 2, 3]
    assert [job.result() for job in as_completed([inc.enqueue(4)], progress=True)] == [5]


def test_many_are_watched_some_at_a_time(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completed_module, "PAGE", 3)
    monkeypatch.setattr(completed_module, "LONGEST_POLL", 0.05)
    inc = mill.task(name="inc")(inc_one)
    # The first ones do not end, so that those behind them are seen only when more are watched.
    late = inc.using(queue="late")
    handle = mill.enqueue(group([*(late.call(n) for n in range(4)), *map(inc.call, range(8))]))
    run_all(mill, queues=["default"])
    ended = iter(handle.as_completed(timeout=30))
    first: list[Job[int]] = [next(ended) for _ in range(8)]
    assert [job.result(0) for job in first] == [n + 1 for n in range(8)]
    run_all(mill)
    assert sorted(job.result(0) for job in ended) == [1, 2, 3, 4]


# -- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_in_a_wait_says_in_one_line_which_jobs_go_on(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    inc = mill.task(name="inc")(inc_one)
    job, handle = inc.enqueue(1), mill.enqueue(map_many(inc, range(3)))

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(mill.broker, "wait_for", interrupted)
    for wait, line in (
        (job.result, f"{job.id} goes on; tidemill cancel {job.id} stops it"),
        (handle.wait, f"{handle.id} goes on; tidemill cancel {handle.id} stops it"),
        (lambda: list(handle), "3 jobs go on; tidemill cancel ID stops one of them"),
    ):
        with pytest.raises(KeyboardInterrupt) as caught:
            wait()
        # A store inside this process ends with the process.
        lines = [] if mill.broker.url.startswith("memory") else [line]
        assert getattr(caught.value, "__notes__", []) == lines


# -- the bar -------------------------------------------------------------------------------------


class Terminal:
    """A terminal to write to; what was written."""

    def __init__(self) -> None:
        self._read, tty = pty.openpty()
        self.file = os.fdopen(tty, "w")
        self._written = b""

    def wait_text(self, text: str) -> None:
        """Wait until this has been written: the kernel passes it on a moment after the write."""
        self.file.flush()
        os.set_blocking(self._read, False)

        def is_there() -> bool:
            with contextlib.suppress(BlockingIOError):
                while True:  # a terminal gives 4 KiB at a time
                    self._written += os.read(self._read, 1 << 16)
            return text.encode() in self._written

        eventually(is_there, text)

    @property
    def written(self) -> str:
        """The text that has come."""
        return self._written.decode()

    def close(self) -> None:
        self.file.close()
        os.close(self._read)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.mark.parametrize("how", ["wait", "result", "as_completed", "aresult"])
def test_a_bar_in_a_terminal(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, terminal: Terminal, how: str
) -> None:
    # case C3
    boom = mill.task(name="boom", retries=0)(fail_one)
    handle = mill.enqueue(map_many(boom, range(3)))
    run_all(mill)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with monkeypatch.context() as within:
        within.setattr(sys, "stderr", terminal.file)
        show(handle, how)
    terminal.wait_text("3 of 3 ended, 1 failed")
    terminal.wait_text(f"boom {handle[1].id} failed: ValueError: no\r\n")


@pytest.mark.parametrize("how", ["wait", "as_completed"])
def test_each_of_ten_failures_is_one_plain_line_above_the_bar(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, terminal: Terminal, how: str
) -> None:
    def wild(number: int) -> None:
        raise ValueError(f"\x1b[41m no\n{number}")

    handle = mill.enqueue(map_many(mill.task(name="wild", retries=0)(wild), range(12)))
    run_all(mill)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with monkeypatch.context() as within:
        within.setattr(sys, "stderr", terminal.file)
        if how == "wait":
            handle.wait(30, progress=True)
        else:
            assert len(list(handle.as_completed(30, progress=True))) == 12
    terminal.file.write("the end")
    terminal.wait_text("the end")
    assert terminal.written.count(" failed: ValueError:  [41m no ") == 10
    assert terminal.written.count("Traceback (most recent call last):") == 1
    assert "11 more jobs failed\r\n" in terminal.written
    assert "\x1b[41m" not in terminal.written


@pytest.mark.parametrize("how", ["wait", "as_completed"])
def test_three_different_tracebacks_stand_below_the_bar(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, terminal: Terminal, how: str
) -> None:
    handle = mill.enqueue(map_many(mill.task(name="way", retries=0)(fail_each_way), range(5)))
    run_all(mill)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with monkeypatch.context() as within:
        within.setattr(sys, "stderr", terminal.file)
        if how == "wait":
            handle.wait(30, progress=True)
        else:
            assert len(list(handle.as_completed(30, progress=True))) == 5
    terminal.file.write("the end")
    terminal.wait_text("the end")
    end = terminal.written.rpartition("5 of 5 ended, 4 failed")[2]
    assert "1 more job failed\r\n" in end
    assert end.count("Traceback (most recent call last):") == 3
    assert end.count("in fail_each_way") == 3


@pytest.mark.parametrize("how", ["wait", "as_completed", "aresult"])
def test_nothing_is_shown_where_there_is_no_terminal(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    boom = mill.task(name="boom", retries=0)(fail_one)
    handle = mill.enqueue(map_many(boom, range(3)))
    run_all(mill)
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(sys, "stdout", written)
    show(handle, how)
    assert written.getvalue() == ""


def show(handle: Any, how: str) -> None:
    if how == "wait":
        handle.wait(30, progress=True)
    elif how == "result":
        handle.result(30, progress=True, return_exceptions=True)
    elif how == "as_completed":
        assert len(list(handle.as_completed(30, progress=True))) == 3
    else:
        asyncio.run(handle.aresult(30, progress=True, return_exceptions=True))


def inc_one(number: int) -> int:
    return number + 1


def fail_each_way(number: int) -> int:
    if number == 0:
        raise ValueError
    if number == 1:
        raise TypeError
    if number == 2:
        raise OSError
    if number == 3:
        raise KeyError
    return number


def fail_one(number: int) -> int:
    if number == 1:
        raise ValueError("no")
    return number


def test_no_wait_raises_for_a_success_that_the_store_no_longer_keeps() -> None:
    with Tidemill("memory://") as mill:

        @mill.task
        def nothing() -> None: ...

        jobs = [nothing.enqueue() for _ in range(2)]
        many = mill.enqueue(group([nothing.call(), nothing.call()]))
        # given jobs that have run, and that the store no longer has, as if it had pruned them
        run_all(mill)
        assert many.delete()
        assert all(mill.broker.delete([job.id for job in jobs]))
        # then each wait ends well
        assert jobs[0].wait() is State.SUCCEEDED
        assert asyncio.run(jobs[0].await_end()) is State.SUCCEEDED
        assert many.wait(progress=True) is State.SUCCEEDED
        assert asyncio.run(many.await_end(progress=True)) is State.SUCCEEDED
        assert len(list(as_completed(jobs))) == 2
        assert len(list(many)) == 2
        # and whoever asks for the result learns that it is gone
        for ask in (jobs[0].result, many.result, lambda: asyncio.run(jobs[0].aresult())):
            with pytest.raises(JobPruned):
                ask()
        with pytest.raises(JobNotFound):
            mill.job("unknown").wait()
