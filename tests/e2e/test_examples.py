"""What lies in examples/ runs as its pages say: each producer's orders arrive at its consumer.

Node, Python, bash and curl are to be there where CI runs; elsewhere what is missing is skipped, as
are PHP, Go and Ruby everywhere, by name. They run in a terminal, from a copy of their folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import greenstalk
import pytest
from harness import LIMIT, eventually
from servers import free_port, program
from servers.beanstalk import Beanstalkd
from servers.http import JobServer
from test_docs import ROOT, blocks

from tidemill import Tidemill

EXAMPLES = ROOT / "examples"
REQUIRED = {
    "bash": "bash",
    "curl": "curl",
    "java": "default-jdk-headless",
    "node": "nodejs",
    "npm": "npm",
}


class Language:
    """How a file of an example is run: its ending, and the words before its name.

    ``needs`` is another program, ``library`` how to see whether its client library is there.
    """

    def __init__(
        self, ending: str, *words: str, needs: str = "", library: tuple[str, str] = ("", "")
    ) -> None:
        self.ending = ending
        self.words = words
        self.needs = needs
        self.library = library

    def command(self, name: str, *args: str) -> list[str]:
        """To run the file; ends the test where what it needs is missing."""
        tool = self.needs or self.words[0]
        if tool in REQUIRED:
            program(tool, REQUIRED[tool])
        elif shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
        option, program_text = self.library
        if option and subprocess.run([tool, option, program_text], capture_output=True).returncode:
            pytest.skip(f"the library of this example is not installed: {program_text}")
        return [*self.words, f"{name}.{self.ending}", *args]


PYTHON = Language("py", sys.executable)
NODE = Language("mjs", "node")
NODE_WITH_NPM = Language("mjs", "node", needs="npm")
PHP = Language("php", "php", library=("-r", "require 'Pheanstalk/autoload.php';"))
GO = Language("go", "go", "run")
RUBY = Language("rb", "ruby", library=("-e", "require 'beaneater'"))
BASH = Language("sh", "bash")
CURL = Language("sh", "sh", needs="curl")
JAVA = Language("java", "java")


def run(folder: Path, env: Mapping[str, str], command: list[str]) -> None:
    """A producer, to its end."""
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=2 * LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def running(
    folder: Path, env: Mapping[str, str], command: list[str]
) -> Iterator[Callable[[], str]]:
    """A consumer in a terminal; what it has printed so far."""
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=inside, stderr=inside,
        process_group=0,
    )  # fmt: skip
    seen = bytearray()

    def output() -> str:
        while select.select([terminal], [], [], 0)[0]:
            seen.extend(os.read(terminal, 4096))
        return seen.decode().replace("\r\n", "\n")

    try:
        yield output
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(inside)
        os.close(terminal)


def orders_arrive(
    folder: Path, env: Mapping[str, str], language: Language, left: Callable[[], int]
) -> None:
    """One order before its consumer starts, one while it waits; afterwards nothing is left."""
    env = {**os.environ, **env}
    run(folder, env, language.command("produce", "17"))
    with running(folder, env, language.command("consume")) as output:
        eventually(lambda: output() == "order 17\n" or _unlike(output()), "the first order")
        run(folder, env, language.command("produce", "18"))
        eventually(lambda: output() == "order 17\norder 18\n" or _unlike(output()), "the second")
        eventually(lambda: left() == 0, "both are done with")


def _unlike(output: str) -> bool:
    assert "order 17\norder 18\n".startswith(output), output
    return False


# -- the protocol of beanstalkd ------------------------------------------------------------------


@pytest.fixture(scope="module")
def beanstalk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples, with what npm installs for them."""
    folder = tmp_path_factory.mktemp("beanstalk")
    shutil.copytree(EXAMPLES / "beanstalk", folder, dirs_exist_ok=True)
    if shutil.which("npm"):
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund"]
        subprocess.run(install, cwd=folder, check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[JobServer, int]]:
    """A server that speaks both, and its port of beanstalkd's protocol."""
    port = free_port()
    server = JobServer("--beanstalk", f"127.0.0.1:{port}")
    yield server, port
    server.close()


@pytest.fixture(scope="module", params=["tidemill", "beanstalkd"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of ours, and of the one that the clients were written for."""
    if request.param == "tidemill":
        yield request.getfixturevalue("both")[1]
        return
    server = Beanstalkd()
    yield server.port
    server.close()


BY_BEANSTALK = [PYTHON, NODE_WITH_NPM, PHP, GO, RUBY, BASH]


@pytest.mark.parametrize("language", BY_BEANSTALK, ids=lambda x: x.ending)
def test_by_the_protocol_of_beanstalkd(beanstalk: Path, port: int, language: Language) -> None:
    with greenstalk.Client(("127.0.0.1", port)) as client:

        def left() -> int:
            told = client.stats_tube("orders")
            return int(told["current-jobs-ready"] + told["current-jobs-reserved"])

        another = client.put("for others, in the tube that every client begins with")
        orders_arrive(beanstalk, {"PORT": str(port)}, language, left)
        client.delete(another)


# -- HTTP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", [PYTHON, NODE, CURL], ids=lambda x: x.ending)
def test_over_http(tmp_path: Path, both: tuple[JobServer, int], language: Language) -> None:
    server, _ = both
    shutil.copytree(EXAMPLES / "http", tmp_path, dirs_exist_ok=True)

    def left() -> int:
        queue = server.get("/v1/queues/orders").json
        return int(queue["ready"] + queue["running"])

    orders_arrive(tmp_path, {"SERVER": server.url}, language, left)


@pytest.mark.parametrize("language", [NODE, JAVA], ids=lambda x: x.ending)
def test_a_task_whose_worker_is_killed_runs_on_another(
    both: tuple[JobServer, int], language: Language
) -> None:
    # case W6, law 5
    server, _ = both
    name = "Worker" if language is JAVA else "worker"
    env = {**os.environ, "SERVER": server.url, "TTR": "1"}
    folder, command = EXAMPLES / "http", language.command(name)

    def call(name: str, **kwargs: object) -> str:
        body = {"task": "shop.resize", "queue": "images", "args": [name], "kwargs": kwargs}
        return str(server.post("/v1/jobs", body).json["id"])

    def log_of(job_id: str) -> list[str]:
        return [line["line"] for line in server.get(f"/v1/jobs/{job_id}").json["log"]]

    with running(folder, env, command):
        # given a job in the middle of its run, which lasts for several ttr
        job_id = call('a "ä".png', seconds=6)
        eventually(lambda: log_of(job_id), "the job runs")
    # when its worker is killed, and another comes
    with running(folder, env, command):
        end = server.get(f"/v1/jobs/{job_id}/result?wait=60", timeout=2 * LIMIT).json
        # then it has run there
        assert (end["state"], end["result"]) == ("succeeded", 'a "ä".png at 640'), end
        found = server.get(f"/v1/jobs/{job_id}").json
        outcomes = [each["outcome"] for each in found["attempts"]]
        assert (outcomes[0], outcomes[-1]) == ("retry", "success"), found["attempts"]
        assert len(log_of(job_id)) == len(outcomes)
        # and one that is cancelled stops with the next heartbeat
        job_id = call("b.png", seconds=600)
        eventually(lambda: log_of(job_id), "the job runs")
        assert server.post(f"/v1/jobs/{job_id}/cancel").status == 204
        end = server.get(f"/v1/jobs/{job_id}/result?wait=60", timeout=2 * LIMIT).json
        assert end["state"] == "cancelled"


def test_a_worker_in_node_completes_many_tasks_each_with_its_own_result(
    both: tuple[JobServer, int],
) -> None:
    server, _ = both
    job = {"task": "shop.resize", "queue": "images"}
    jobs = [{**job, "args": [f"{n}.png"]} for n in range(30)]
    placed = server.post("/v1/jobs/batch", {"jobs": jobs}).json["jobs"]
    env = {**os.environ, "SERVER": server.url}
    with running(EXAMPLES / "http", env, NODE.command("worker")):
        ends = [
            server.get(f"/v1/jobs/{it['id']}/result?wait=60", timeout=2 * LIMIT) for it in placed
        ]
    assert [end.json["result"] for end in ends] == [f"{n}.png at 640" for n in range(30)]


# -- without a server ----------------------------------------------------------------------------


def test_on_disk(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "embedded", tmp_path, dirs_exist_ok=True)
    with Tidemill(f"lmdb://{tmp_path}/jobs") as mill:
        left = mill.queue("orders").size
        orders_arrive(tmp_path, {"TIDEMILL_URL": mill.url}, PYTHON, left)


# -- all of them on one store --------------------------------------------------------------------


def test_orders_put_by_each_language_are_taken_by_another(
    beanstalk: Path, both: tuple[JobServer, int]
) -> None:
    server, port = both
    env = {**os.environ, "TIDEMILL_URL": server.where, "SERVER": server.url, "PORT": str(port)}
    run(EXAMPLES / "embedded", env, PYTHON.command("produce", "1"))
    run(EXAMPLES / "http", env, CURL.command("produce", "2"))
    run(beanstalk, env, BASH.command("produce", "3"))
    with running(beanstalk, env, BASH.command("consume")) as output:
        eventually(lambda: output() == "order 1\norder 2\norder 3\n", "all three")


def test_a_task_from_another_language(tmp_path: Path) -> None:
    """As the page says: the shop's, by curl and by the protocol of beanstalkd."""
    shutil.copy(EXAMPLES / "embedded" / "shop.py", tmp_path)
    url, port = f"lmdb://{tmp_path}/jobs", free_port()
    env = {"TIDEMILL_URL": url, "PYTHONPATH": str(tmp_path)}
    options = ("--beanstalk", f"127.0.0.1:{port}", "--beanstalk-tasks")
    server = JobServer(*options, where="shop:mill", env=env)
    worker = subprocess.Popen(
        [sys.executable, "-m", "tidemill", "worker", "shop:mill", "-p", "1"],
        env={**os.environ, **env}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        command = shlex.split(re.findall(r"\$ (curl .*)", (EXAMPLES / "README.md").read_text())[-1])
        assert command[-1] == "localhost:8333/v1/jobs"
        command[-1] = f"{server.url}/v1/jobs"
        done = subprocess.run([*command, "-sS"], check=True, capture_output=True, timeout=LIMIT)
        with greenstalk.Client(("127.0.0.1", port)) as client:
            number = client.put(command[2])
        with Tidemill(url) as mill:
            for job_id in (json.loads(done.stdout)["id"], f"#{number:012}"):
                assert mill.job(job_id).result(timeout=2 * LIMIT) == "a.png at 640"
    finally:
        worker.terminate()
        worker.wait(LIMIT)
        server.close()


def test_the_shop_is_that_of_the_readme() -> None:
    shop = (EXAMPLES / "embedded" / "shop.py").read_text()
    assert shop == blocks(ROOT / "README.md", "python")[0]


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.glob("*/*.*"):
        if file.name != "package.json":
            assert f"]({file.relative_to(EXAMPLES)})" in page, f"{file.name} is not on the page"
