"""The verbs that look: jobs, job, explain, queues, info."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_store import Desk

from tidemill import State, group
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.core.job import Note, Owner

pytestmark = pytest.mark.everyday


def test_jobs_are_found_by_every_filter(desk: Desk) -> None:
    # given
    sums = [desk.add.using(key=f"k{n}").enqueue(n) for n in range(3)]
    broken = desk.bad.enqueue("a thing")
    desk.work()

    def ids(*words: str) -> list[str]:
        return [row["id"] for row in desk.json("jobs", *words)["jobs"]]

    # then
    newest_first = [broken.id, *(job.id for job in reversed(sums))]
    assert ids() == newest_first
    assert ids("--state", "failed") == [broken.id]
    assert ids("--state", "failed", "--state", "succeeded") == newest_first
    assert ids("--queue", "sums") == newest_first[1:]
    assert ids("--task", "bad") == [broken.id]
    assert ids("--key", "k1") == [sums[1].id]
    assert ids("--tag", "maths") == newest_first[1:]
    assert ids("--search", "THING") == [broken.id]
    assert ids("--queue", "sums", "--state", "failed") == []


def test_jobs_come_in_pages(desk: Desk) -> None:
    made = [desk.add.enqueue(n).id for n in range(5)]
    first = desk.json("jobs", "--limit", "3")
    second = desk.json("jobs", "-n", "3", "--cursor", first["cursor"])
    found = [row["id"] for page in (first, second) for row in page["jobs"]]
    assert found == made[::-1]
    assert second["cursor"] is None
    assert f"--cursor {first['cursor']}" in desk.run("jobs", "--limit", "3").stderr


def test_a_pipe_gets_whole_lines_and_no_colour(desk: Desk) -> None:
    desk.bad.enqueue("a thing " * 10)
    desk.work()
    out = desk.run("jobs").stdout
    assert "cannot do " + "a thing " * 9 in out
    assert "\x1b" not in out


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_narrow_terminal_gets_short_lines_and_short_ids(desk: Desk, width: int) -> None:
    job = desk.bad.enqueue("a thing " * 10)
    desk.work()
    for verb in ("jobs", "queues"):
        out = desk.run(verb, env={"COLUMNS": str(width)}).stdout
        assert max(map(len, out.splitlines())) <= width
        assert "failed" in out
    out = desk.run("jobs", env={"COLUMNS": str(width)}).stdout
    assert out.splitlines()[1].startswith(f"{job.id[-8:]}  failed")
    assert "error or arg" in out


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_line_is_cut_and_never_wrapped_whatever_the_ids(desk: Desk, width: int) -> None:
    for n in range(3):
        desk.bad.using(id=f"invoice-{n}-" + "x" * 150).enqueue("a thing")
    out = desk.run("jobs", env={"COLUMNS": str(width)}).stdout
    assert len(out.splitlines()) == 4
    assert max(map(len, out.splitlines())) <= width
    assert out.splitlines()[1].startswith("invoic")
    assert "  ready  " in out.splitlines()[1]


def test_a_running_job_shows_its_progress_in_percent(desk: Desk) -> None:
    # given a running job that has reported its progress, and one that knows no total
    desk.add.using(id="half").enqueue(1)
    desk.add.using(id="unknown").enqueue(2)
    broker = desk.mill.broker
    broker.attach(Owner(id="o", kind="worker", name="w7", pid=os.getpid(), queues=("sums",)))
    leases = broker.exchange(Step("o", want=Want(2))).leases
    by_id = {lease.open().id: lease.token for lease in leases}
    notes = [Note(by_id["half"], done=21, total=42, text="b.png"), Note(by_id["unknown"], done=9)]
    broker.exchange(Step("o", notes=notes))
    # then
    lines = desk.run("jobs").stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["unknown", "running", "sums"],
        ["half", "running", "50%"],
    ]
    assert "progress  21 of 42 (50%), b.png\n" in desk.run("job", "half").stdout
    assert "progress  9\n" in desk.run("job", "unknown").stdout
    # and the running attempt counts
    assert all(" 1/4 " in line for line in lines[1:])
    assert "attempts  attempt 1 of 4" in desk.run("job", "half").stdout


def test_identical_tracebacks_are_folded(desk: Desk) -> None:
    # given two jobs that fail at the same line, twice each
    first = desk.bad.enqueue("one")
    second = desk.bad.enqueue("two")
    desk.work()
    # then a list prints the traceback once
    out = desk.run("jobs", "-v").stdout
    assert out.count("Traceback") == 1
    assert f"\n{second.id[-8:]}  ValueError: cannot do two\n    Traceback" in out
    assert f"\n{first.id[-8:]}  ValueError: cannot do one\n    same as {second.id[-8:]}\n" in out
    # and so does one job
    out = desk.run("job", first.id).stdout
    assert out.count("Traceback") == 1
    assert out.rstrip().endswith("same as attempt 1 of 2")


def test_a_job_names_the_zone_of_its_times_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = desk.bad.enqueue("a thing")
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        out = desk.run("job", job.id).stdout
    time.tzset()
    assert "times     IST, UTC+0530\n" in out
    assert out.count("IST") == 1


def test_job_shows_the_whole_trail(desk: Desk) -> None:
    # given a job that failed twice
    job = desk.bad.enqueue("a thing")
    desk.work()
    # when
    out = desk.run("job", job.id).stdout
    # then everything is there, in order
    parts = [
        *("created", "leased", "by w1", "attempt 1", "trying a thing", "failed, to be retried"),
        *("ValueError: cannot do a thing", "Traceback"),
        *("attempt 2", "failed, no attempts are left"),
    ]
    place = 0
    for part in parts:
        place = out.index(part, place)
    assert "1 of 4 (25%)" in out
    # and for programs
    document = desk.json("job", job.id)
    assert document["state"] == "failed"
    assert [a["number"] for a in document["attempts"]] == [1, 2]
    assert "cannot do" in document["attempts"][1]["traceback"]
    assert document["trail"][0]["what"] == "created"
    assert document["result"] is None


def test_job_shows_the_result(desk: Desk) -> None:
    job = desk.add.enqueue(41)
    desk.work()
    assert desk.run("job", job.id).stdout.rstrip().endswith("42")
    assert desk.json("job", job.id)["result"] == 42


def test_arguments_of_jobs_cannot_control_the_terminal(desk: Desk) -> None:
    job = desk.bad.enqueue("\x1b[31mred")
    desk.work()
    for words in (["job", job.id], ["jobs"]):
        out = desk.run(*words).stdout
        assert "\x1b" not in out
        assert r"\x1b[31mred" in out


@pytest.mark.parametrize("verb", ["job", "explain"])
def test_an_unknown_id_is_one_sentence(desk: Desk, verb: str) -> None:
    desk.add.enqueue(1)
    result = desk.run(verb, "nothing")
    assert result.exit_code == 1
    assert "no job has the id 'nothing'" in result.stderr
    assert "tidemill jobs --search" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_beginning_of_an_id_is_enough(desk: Desk) -> None:
    # given ids that begin alike, one of them the beginning of another
    for job_id in ("order-17", "order-18", "order-18-b", "1"):
        desk.add.using(id=job_id).enqueue(1)
    # then a beginning that only one has names it, and a whole id names itself
    assert desk.json("job", "order-17")["id"] == "order-17"
    assert desk.json("job", "order-18-")["id"] == "order-18-b"
    assert desk.json("explain", "order-18")["id"] == "order-18"
    assert desk.json("cancel", "order-18-") == {"cancelled": ["order-18-b"], "refused": []}
    assert desk.json("retry", "order-18-") == {"retried": ["order-18-b"], "refused": []}
    # and one that several have changes nothing, and lists them
    for verb in ("job", "explain", "cancel", "retry"):
        result = desk.run(verb, "order-1")
        assert result.exit_code == 2
        assert "several ids begin with order-1: order-18-b, order-18, order-17\n" in result.stderr
    for n in range(9):
        desk.add.using(id=f"order-9{n}").enqueue(1)
    assert "order-94 and more\n" in desk.run("job", "order-9").stderr
    # and one too short is only an id
    assert desk.run("job", "ord").exit_code == 1
    assert desk.json("job", "1")["id"] == "1"


def test_the_ending_of_an_id_is_enough(desk: Desk) -> None:
    # given
    jobs = [desk.add.enqueue(n) for n in range(3)]
    whole = desk.mill.enqueue(group(desk.add.call(n) for n in range(2)))
    desk.add.using(id="last-1-of-the-day").enqueue(1)
    desk.add.using(id="last-2-of-the-day").enqueue(1)
    # then the short ids of a list name the jobs
    for verb in ("job", "explain"):
        assert desk.json(verb, jobs[0].id[-8:])["id"] == jobs[0].id
    assert desk.json("cancel", jobs[1].id[-8:])["cancelled"] == [jobs[1].id]
    assert desk.json("retry", jobs[1].id[-8:])["retried"] == [jobs[1].id]
    assert desk.json("delete", jobs[1].id[-8:])["deleted"] == [jobs[1].id]
    # and those of a group and of its members, too
    shown = desk.run("jobs").stdout
    assert f"{whole.id[-8:]}.0000001  " in shown
    assert desk.json("job", f"{whole.id[-8:]}.0000001")["id"] == whole[1].id
    assert desk.json("job", whole.id[-8:])["id"] == whole.id
    members = desk.json("jobs", "--group", whole.id[-8:])["jobs"]
    assert [row["id"] for row in members] == [whole[1].id, whole[0].id]
    # and an ending that several ids have changes nothing
    result = desk.run("delete", "of-the-day")
    assert result.exit_code == 2
    text = "several ids end with of-the-day: last-2-of-the-day, last-1-of-the-day\n"
    assert text in result.stderr


def test_an_empty_list_names_a_misspelt_queue_or_task(desk: Desk) -> None:
    desk.add.enqueue(1)
    assert "no queue has the name 'smus' here; did you mean 'sums'?" in (
        desk.run("jobs", "--queue", "smus").stdout
    )
    app = desk.write_app()
    out = desk.run("jobs", "--task", "ad", "--app", app, url=False).stdout
    assert "the app has no task 'ad'; did you mean 'add'?" in out
    assert desk.run("jobs", "--state", "failed").stdout == "no jobs match\n"


def test_explain_says_why_it_waits(desk: Desk) -> None:
    job = desk.add.enqueue(1)
    later = desk.add.using(delay=3600).enqueue(1)
    assert "no worker serves queue 'sums'" in desk.run("explain", job.id).stdout
    told = desk.run("explain", later.id).stdout
    assert re.match(r"It waits until .*:\d\d:\d\d, in \d+ min, as it was put with a delay", told)
    desk.run("pause", "sums")
    document = desk.json("explain", job.id)
    assert "paused" in document["explanation"]
    assert document["workers"] == []


def test_the_numbers_agree_everywhere(desk: Desk) -> None:
    # case W5
    for n in range(3):
        desk.add.enqueue(n)
    desk.bad.enqueue("x")
    desk.work()
    desk.add.using(delay=3600).enqueue(1)
    desk.add.enqueue(1)
    # when
    totals = desk.json("info")["totals"]
    queues = desk.json("queues")["queues"]
    # then
    for name, value in totals.items():
        assert value == sum(row[name] for row in queues)
    for state in State:
        listed = len(desk.json("jobs", "--state", str(state), "--limit", "100")["jobs"])
        assert totals[state] == listed, state
    assert totals["accepted"] == 6
    shown = desk.run("info").stdout
    assert "1 scheduled, 1 ready, 6 accepted, 3 succeeded, 1 failed, 1 retried" in shown


def test_looking_makes_no_store(desk: Desk, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for verb in (["jobs"], ["queues"], ["info"], ["job", "x"]):
        result = desk.run(*verb, "--url", f"lmdb://{nowhere}", url=False)
        assert result.exit_code == 3
        assert "there is no store in" in result.stderr
    assert not nowhere.exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["jobs", "--url", "nonsense"], 2, "is not a broker URL"),
        (["jobs", "--url", "warp://x"], 2, "no broker for warp://"),
        (["jobs", "--url", "memory://"], 1, "needs the feature processes"),
        (["jobs", "--app", "no_such_module:mill"], 2, "no module 'no_such_module'"),
        (["jbos"], 2, "did you mean 'jobs'?"),
        (["worker", "x:mill", "-Q", ""], 2, "-Q '' has no queue; write it as -Q urgent,normal"),
        (["worker", "x:mill", "-Q", "a,,b"], 2, "-Q 'a,,b' has an empty name among the queues"),
        (["jobs", "--state", "faild"], 2, "not 'faild'; did you mean 'failed'?"),
        (["jobs", "--curs", "x"], 2, "'--cursor'"),
        (["jobs", "--url", "lmbd://x"], 2, "did you mean 'lmdb'?"),
    ],
)
def test_mistakes_are_sentences(desk: Desk, words: list[str], code: int, said: str) -> None:
    result = desk.run(*words, url=False)
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_an_app_that_cannot_be_imported_is_named_with_its_line(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "app_broken.py"
    path.write_text("x = 1\ny = x / 0\n")
    result = desk.run("jobs", "--app", f"{path}:mill", url=False)
    assert result.exit_code == 2
    assert "cannot be imported: ZeroDivisionError: division by zero\n" in result.stderr
    assert 'app_broken.py", line 2' in result.stderr
    assert result.stderr.count("  File ") == 1


def test_help_loads_no_verb() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from tidemill.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print([name for name in sys.modules if name in ('lmdb', 'rich', 'msgspec', 'tidemill.app')"
        " or name.startswith(('tidemill.cli.', 'tidemill.demo'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
