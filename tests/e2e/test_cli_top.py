"""``tidemill top``: the live table in a terminal, one table, and objects for programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cli_store import Desk
from harness import eventually
from moved_clock import MovedClock
from pty_screen import Screen
from servers import Redis

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.cli.top.snapshot import Meter, take
from tidemill.core.job import Lease, Outcome, Owner, Verdict

TOP = ("-m", "tidemill", "top", "-i", "0.1", "--url")


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    opened: list[Screen] = []
    yield opened
    for screen in opened:
        screen.close()


def lease(desk: Desk, count: int) -> list[Lease]:
    """Have a worker hold so many jobs."""
    broker = desk.mill.broker
    broker.attach(Owner(id="w", name="vm:1", host="vm", pid=1, concurrency=count))
    return broker.exchange(Step("w", want=Want(count))).leases


def settle(desk: Desk, leases: list[Lease], outcome: Outcome = Outcome.SUCCESS) -> None:
    desk.mill.broker.exchange(Step("w", [Verdict(one.token, outcome) for one in leases]))


@pytest.mark.everyday
def test_a_terminal_shows_what_happens_and_obeys_keys(desk: Desk, screens: list[Screen]) -> None:
    # given two running jobs, and one that no worker takes
    jobs = [desk.add.enqueue(n) for n in range(2)]
    leases = lease(desk, 2)
    desk.mill.queue("orders").put(1)
    # then the table shows them
    screen = Screen([*TOP, desk.url])
    screens.append(screen)
    shown = screen.shows("RUNNING, longest first (2)")
    assert "QUEUES by depth (2)" in shown
    assert "2 running" in shown
    assert "1 worker with 2 slots" in shown
    assert shown.count("vm:1") == 3
    # when keys are pressed
    screen.press("s")
    screen.shows("QUEUES by oldest (2)")
    screen.press("?")
    screen.shows("show or hide these keys")
    screen.press("?")
    screen.press("j\r")
    screen.shows(f"job       {jobs[1].id}")
    screen.shows("created")
    screen.press("\x1b")
    screen.shows("RUNNING")
    screen.press("\x1b[A\r")  # the arrow up
    screen.shows(f"job       {jobs[0].id}")
    screen.press("\r")
    # when the jobs end
    settle(desk, leases)
    # then the table follows by itself
    screen.shows("no job is running")
    # when the display is paused
    screen.press("p")
    screen.shows("PAUSED")
    desk.mill.queue("later").put(1)
    screen.press("sss")
    assert "later" not in screen.shows("QUEUES by name (2)")
    screen.press("p")
    screen.shows("QUEUES by name (3)")
    # when top ends
    screen.press("q")
    assert screen.ended() == 0
    assert screen.is_given_back()


def test_a_new_size_is_used_at_once(desk: Desk, screens: list[Screen]) -> None:
    for n in range(40):
        desk.mill.queue(f"queue-with-a-long-name-{n:02}").put(1)
    screen = Screen([*TOP, desk.url], columns=120, rows=40)
    screens.append(screen)
    screen.shows("q end")
    for columns, rows in ((50, 15), (200, 60), (20, 6)):
        screen.resize(columns, rows)
        eventually(lambda size=(columns, rows): fills(screen, *size), "a frame fills it")
        screen.shows("q end")


def fills(screen: Screen, columns: int, rows: int) -> bool:
    lines = screen.text.splitlines()
    return len(lines) == rows and max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)]
)
def test_a_signal_gives_the_terminal_back(
    desk: Desk, screens: list[Screen], signum: signal.Signals, code: int
) -> None:
    desk.add.enqueue(1)
    screen = Screen([*TOP, desk.url])
    screens.append(screen)
    screen.shows("QUEUES")
    assert screen.second
    os.kill(screen.process.pid, signum)
    assert screen.ended() == code
    assert screen.is_given_back()


def test_a_suspended_top_gives_the_terminal_back_until_it_goes_on(
    desk: Desk, screens: list[Screen]
) -> None:
    desk.add.enqueue(1)
    screen = Screen([*TOP, desk.url])
    screens.append(screen)
    screen.shows("QUEUES")
    # when it is suspended
    os.kill(screen.process.pid, signal.SIGTSTP)
    _, status = os.waitpid(screen.process.pid, os.WUNTRACED)
    # then
    assert os.WIFSTOPPED(status)
    assert screen.is_given_back()
    # when it goes on
    screen.lines.clear()
    os.kill(screen.process.pid, signal.SIGCONT)
    screen.shows("QUEUES")
    assert screen.second
    screen.press("q")
    assert screen.ended() == 0
    assert screen.is_given_back()


def test_an_exception_gives_the_terminal_back(desk: Desk, screens: list[Screen]) -> None:
    desk.add.enqueue(1)
    code = (
        "from tidemill.cli import main\n"
        "from tidemill.cli.top.view import View\n"
        "View.press = lambda view, key: 1 / 0\n"
        f"main(['top', '--url', {desk.url!r}])\n"
    )
    screen = Screen(["-c", code])
    screens.append(screen)
    screen.shows("QUEUES")
    screen.press("x")
    assert screen.ended() == 1
    assert screen.is_given_back()
    assert "ZeroDivisionError" in screen.said.partition("\x1b[?1049l")[2]


def test_keys_work_while_the_store_is_away(screens: list[Screen]) -> None:
    # given a server
    server = Redis()
    try:
        with Tidemill(server.url) as mill:
            mill.queue("orders").put(1)
        screen = Screen([*TOP, f"{server.url}?patience=0"])
        screens.append(screen)
        screen.shows("orders")
        # when it stops, then top says so, keeps what it knew, and obeys
        server.kill()
        assert "orders" in screen.shows("cannot reach")
        screen.press("?")
        screen.shows("show or hide these keys")
        # when it is back
        server.start()
        screen.lacks("cannot reach")
        screen.press("q")
        assert screen.ended() == 0
    finally:
        server.close()


def test_top_needs_a_terminal(desk: Desk) -> None:
    desk.add.enqueue(1)
    result = desk.run("top")
    assert result.exit_code == 2
    assert "top needs a terminal; elsewhere add --once or --json" in result.output


@pytest.mark.everyday
def test_one_table(desk: Desk) -> None:
    desk.add.enqueue(1)
    lease(desk, 1)
    desk.bad.enqueue("x")
    desk.mill.queue("orders").put(1)
    lines = desk.run("top", "--once").stdout.splitlines()
    assert lines[0].startswith("2 ready   1 running")
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["sums"][1:3] == ["0", "1"]
    assert rows["default"][1:3] == ["1", "0"]
    assert rows["vm:1"][1] == "worker"
    assert any(" add " in line and " vm:1 " in line for line in lines)


@pytest.mark.everyday
def test_a_store_that_moves_asks_for_no_worker(desk: Desk, screens: list[Screen]) -> None:
    desk.add.enqueue(1)
    desk.mill.broker.depart("lmdb:///elsewhere")
    sentence = "all of this store goes to lmdb:///elsewhere: set TIDEMILL_URL to lmdb:///elsewhere"
    shown = desk.run("top", "--once").stdout
    assert sentence in " ".join(shown.split())
    assert "no worker" not in shown
    screen = Screen([*TOP, desk.url])
    screens.append(screen)
    assert "start one" not in screen.shows(sentence)


@pytest.mark.everyday
def test_one_object(desk: Desk) -> None:
    job = desk.add.enqueue(1)
    lease(desk, 3)
    found = desk.json("top", "--once")
    assert found["totals"]["running"] == 1
    (queue,) = found["queues"]
    assert (queue["name"], queue["running"], queue["workers"]) == ("sums", 1, 1)
    assert queue["in_per_second"] == 0
    (running,) = found["running"]
    assert (running["id"], running["task"], running["worker"]) == (job.id, "add", "vm:1")
    (worker,) = found["workers"]
    assert (worker["name"], worker["concurrency"]) == ("vm:1", 3)
    assert found["missing"] == []


def test_one_object_a_look(desk: Desk) -> None:
    desk.add.enqueue(1)
    words = [sys.executable, *TOP, desk.url, "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        first = json.loads(process.stdout.readline())
        # when a job arrives, then an object tells of it, and of the rate
        desk.add.enqueue(2)
        lines = (json.loads(line) for line in process.stdout)
        later = next(found for found in lines if found["totals"]["ready"] == 2)
        assert later["time"] > first["time"]
        assert later["queues"][0]["in_per_second"] > 0
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 0


def test_rates_are_differences_of_totals(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a look
    desk.add.enqueue(1)
    clock = MovedClock(monkeypatch, speed=0.0)
    monkeypatch.setattr(Meter, "_read_minutes", lambda self, mill: None)  # a minute may end here
    meter = Meter()
    (row,) = take(desk.mill, meter).queues
    assert row.rates.out is None
    # when 8 jobs came and 4 of them ended, 2 of these in failure, within 4 seconds
    for n in range(8):
        desk.add.enqueue(n)
    leases = lease(desk, 4)
    settle(desk, leases[:2])
    settle(desk, leases[2:], Outcome.FAIL)
    clock.advance(4)
    # then
    (row,) = take(desk.mill, meter).queues
    assert (row.rates.into, row.rates.out, row.rates.failed) == (2.0, 1.0, 0.5)
    assert row.rates.points == (1.0,)


def test_the_first_look_has_the_rates_of_the_last_minute(desk: Desk) -> None:
    # given the numbers of two minutes, as workers keep them
    desk.add.enqueue(1)
    minute = int(time.time()) // 60 * 60
    rows = [
        HistoryRow("queue", "sums", 60, minute - 120, (100, 40, *[0] * 10)),
        HistoryRow("queue", "sums", 60, minute - 60, (700, 300, 40, *[0] * 9)),
    ]
    with_history(desk.mill.broker, "test").keep_history(rows)
    # when
    (row,) = take(desk.mill, Meter()).queues
    # then, unless a minute has just begun
    if int(time.time()) // 60 * 60 == minute:
        assert (row.rates.into, row.rates.out) == (10.0, 5.0)
        assert row.rates.points[-1] == 5.0


def test_a_look_reads_the_store_a_fixed_number_of_times(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given many running jobs
    for n in range(50):
        desk.add.enqueue(n)
    lease(desk, 50)
    meter = Meter()
    take(desk.mill, meter)  # once in a minute a look also reads the history
    broker, calls = desk.mill.broker, list[str]()
    for name in ("stats", "owners", "find", "get", "info", "put", "exchange", "tick"):
        real = getattr(broker, name)

        def counted(*args: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            calls.append(name)
            return real(*args, **more)

        monkeypatch.setattr(broker, name, counted)
    # when
    snapshot = take(desk.mill, meter)
    # then
    assert len(snapshot.jobs) == 50
    assert sorted(calls) == ["find", "owners", "stats"]


def test_a_look_writes_nothing(desk: Desk) -> None:
    desk.add.enqueue(1)
    lease(desk, 1)
    before = desk.mill.broker.info()["commits"]
    assert desk.run("top", "--once").exit_code == 0
    assert desk.mill.broker.info()["commits"] == before
