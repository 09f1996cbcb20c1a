"""The example programs and the tutorial run as their pages say, and show what they promise.

Each starts by its one command, from a copy of its folder. The pages of the web apps are read by
``page_reader.mjs``, which runs their scripts in Node and presses their buttons.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from harness import LIMIT, eventually
from servers import free_port, program
from test_docs import DOCS, ROOT, blocks

from tidemill import Tidemill

EXAMPLES = ROOT / "examples"
PROGRAMS = ("fastapi", "flask", "script", "machines", "llm")
READER = Path(__file__).with_name("page_reader.mjs")
INCLUDED = re.compile(r'^ *--8<-- "examples/([^":]+)(?::(\d+):(\d+))?"$', re.MULTILINE)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store"


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES / name, tmp_path / name))


@contextlib.contextmanager
def running(folder: Path, env: Mapping[str, str], *command: str) -> Iterator[Path]:
    """A Python program for the time of the block; the file with its output.

    TERM must end it, and all that it started.
    """
    output = folder / "output"
    with output.open("a") as out:
        process = psutil.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **env},
            stdout=out,
            stderr=out,
        )
    try:
        yield output
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=LIMIT)
        assert not alive, output.read_text()
    finally:
        if process.is_running():
            for each in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def run(folder: Path, env: Mapping[str, str], *command: str) -> str:
    """The output of a Python program that ends by itself."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=2 * LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=LIMIT):
            return True
    except OSError:
        return False


def read(url: str, *steps: str) -> list[str]:
    """Press buttons of a page and wait for texts, in turns; the last lines of the page."""
    done = subprocess.run(
        [program("node", "nodejs"), READER, url, *steps],
        capture_output=True, text=True, timeout=5 * LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# -- the web pages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "button", "result"),
    [
        ("fastapi", "Resize 20 photos", "20 photos resized"),
        ("flask", "Send 20 letters", "20 letters sent by Ada"),
    ],
)
def test_a_page_starts_jobs_shows_their_progress_and_cancels_them(
    tmp_path: Path, store: str, name: str, button: str, result: str
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    env = {"TIDEMILL_URL": store, "PORT": str(port)}
    with running(copied(name, tmp_path), env, "run.py"):
        eventually(lambda: answers(url), "the page answers")
        # when a user starts a job, then its result comes onto the page
        read(url, button, f"20 of 20, succeeded {result}")
        # and of a longer job first the progress, and its end when the user cancels it
        started = urllib.request.Request(f"{url}jobs?count=1000", method="POST")
        with urllib.request.urlopen(started, timeout=LIMIT) as reply:
            assert reply.status == 202
        read(url, "", r"[1-9]\d* of 1000, running", "Cancel", "cancelled stopped after")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}jobs/unknown", timeout=LIMIT)


def test_the_two_pages_differ_in_words_alone() -> None:
    page = (EXAMPLES / "fastapi" / "page.html").read_text()
    words = page.replace("Photos", "Letters").replace("Resize 20 photos", "Send 20 letters")
    assert words == (EXAMPLES / "flask" / "page.html").read_text()


# -- the other programs --------------------------------------------------------------------------


def test_a_script_counts_each_file_once(tmp_path: Path, store: str) -> None:
    # given two files of text, and one that is none
    folder = copied("script", tmp_path)
    (folder / "a.txt").write_text("one two three")
    (folder / "b.txt").write_text("four five")
    (folder / "c.bin").write_bytes(b"\xff\xfe")
    command = ("words.py", "a.txt", "b.txt", "c.bin")
    env = {"TIDEMILL_URL": store}
    # when the script runs, then it prints the counts, and why it has none
    first, second, third = run(folder, env, *command).splitlines()
    assert (first, second) == ("3 a.txt", "2 b.txt")
    assert third.startswith("UnicodeDecodeError: ")
    assert third.endswith(" c.bin")
    # when it runs again, then only the changed file is counted again
    (folder / "b.txt").write_text("four five six seven")
    os.utime(folder / "b.txt", ns=(0, 0))
    lines = run(folder, env, "words.py", "a.txt", "b.txt").splitlines()
    assert lines == ["3 a.txt", "4 b.txt"]
    with Tidemill(store) as mill:
        assert len(list(mill.jobs(state="succeeded"))) == 3


def test_machines_share_the_jobs_of_one_redis(tmp_path: Path) -> None:
    program("redis-server", "redis-server")
    env = {"REDIS_URL": ""}
    total, *machines = run(copied("machines", tmp_path), env, "run.py").splitlines()
    assert total == f"sum {sum(n * n for n in range(40))}"
    ran = dict(line.split(" ran ") for line in machines)
    assert set(ran) <= {"machine-1", "machine-2", "machine-3"}
    assert sum(map(int, ran.values())) == 40


def test_a_batch_of_prompts_keeps_to_the_limits_of_the_api(tmp_path: Path, store: str) -> None:
    # when the batch runs against the fake API
    lines = run(copied("llm", tmp_path), {"TIDEMILL_URL": store}, "run.py").splitlines()
    # then each prompt has its answer, in order
    *answered, summary = lines
    prompts = [f"Describe the photo {n}.jpg" for n in range(40)]
    assert answered == [f"{prompt}: an answer to {prompt!r}" for prompt in prompts]
    # and no more requests were open than the limit allows
    requests, refused, most_open = map(int, re.findall(r"\d+", summary))
    assert (requests, refused) == (46, 6)
    assert most_open <= 4
    with Tidemill(store) as mill:
        jobs = list(mill.jobs(task="prompts.ask"))
        runs = [job.attempts for job in jobs]
        created = min(job.record.envelope.created for job in jobs)
    # and 10 started in a second, after 2 at once
    starts = sorted(attempt.started for each in runs for attempt in each)
    assert len(starts) == requests
    assert starts[-1] - created > (requests - 2) / 10 - 0.1
    # and a refused request came again no sooner than the API had said
    waits = [b.started - a.ended for each in runs for a, b in pairwise(each)]
    assert len(waits) == refused
    assert min(waits) > 0.99


# -- the tutorial --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [("uvicorn", "page:app", "--port"), ("flask", "--app", "page_flask", "run", "--port")],
    ids=["fastapi", "flask"],
)
def test_the_page_of_the_tutorial(tmp_path: Path, store: str, command: tuple[str, ...]) -> None:
    # given the page, with a job that lasts until it is cancelled
    folder = copied("tutorial", tmp_path)
    for name in ("page.py", "page_flask.py"):
        (folder / name).write_text((folder / name).read_text().replace("(20)", "(10_000)"))
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    env = {"TIDEMILL_URL": store}
    worker = ("-m", "tidemill", "worker", "tasks:mill", "-p", "1")
    with running(folder, env, *worker), running(folder, env, "-m", *command, str(port)):
        eventually(lambda: answers(url), "the page answers")
        # when a user starts the job and cancels it, then the page shows both
        progress = r"running, [1-9]\d* of 10000"
        read(url, "Resize 20 photos", progress, "Cancel", "cancelled, ")


def test_the_tasks_of_the_tutorial(tmp_path: Path, store: str) -> None:
    folder = copied("tutorial", tmp_path)
    env = {"TIDEMILL_URL": store}
    with running(folder, env, "-m", "tidemill", "worker", "tasks:mill", "-p", "1"):
        wait = ("--wait", str(LIMIT), "--app", "tasks:mill")
        for call, result in [
            (("tasks.greet", "Ada"), "Hello, Ada!"),
            (("tasks.fetch", "https://example.com"), "200 OK"),
            (("tasks.resize", "2"), "2 photos resized"),
        ]:
            assert run(folder, env, "-m", "tidemill", "enqueue", *call, *wait).strip() == result
        with Tidemill(store) as mill:
            assert [each.name for each in mill.schedules] == ["tasks.tidy"]
            (fetched,) = mill.jobs(task="tasks.fetch")
            assert len(fetched.attempts) == 3


def test_the_tutorial_shows_its_files_from_beginning_to_end() -> None:
    page = DOCS / "tutorial.md"
    files = {file.name: file.read_text() for file in EXAMPLES.glob("tutorial/*.*")}
    files.pop("page_flask.py")  # the page names the file, and shows the same page with FastAPI
    shown = [*blocks(page, "python"), *blocks(page, "html")]
    steps = [block.strip() for block in shown if block not in files.values()]
    assert "\n\n\n".join(steps) == files.pop("tasks.py").strip()
    assert {*files} == {"first.py", "page.py", "page.html"}
    for name, text in files.items():
        assert text in shown, name
    assert "`examples/tutorial/page_flask.py`" in page.read_text()


# -- the page of the examples --------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_page_of_the_examples_shows_each_program(name: str) -> None:
    page = (DOCS / "examples.md").read_text()
    shown = {found[0] for found in INCLUDED.findall(page)}
    for file in (EXAMPLES / name).glob("*.*"):
        if file.name != "README.md":
            assert str(file.relative_to(EXAMPLES)) in shown, f"{file.name} is not on the page"
    readme = (EXAMPLES / name / "README.md").read_text()
    (command,) = re.findall(r"^\$ (python examples/\S+)", readme, re.MULTILINE)
    assert f"$ {command}" in page
    assert (ROOT / command.split()[1]).exists()
