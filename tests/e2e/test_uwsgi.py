"""uWSGI forks its processes from one that has used the store. Python does not see the fork."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import LIMIT, eventually
from servers import free_port, new_store
from servers.base import lacks

from tidemill import Tidemill

KINDS = ("lmdb", "redis", "postgresql", "rabbitmq", "http", "django")
REQUESTS = 200
APP = """
import json, os
from tidemill import Tidemill

mill = Tidemill({url!r})
queue = mill.queue("q")
queue.put("at import")


def application(environ, start_response):
    start_response("200 OK", [("Content-Type", "application/json")])
    ids = [queue.put(n).id for n in range(3)]
    return [json.dumps([os.getpid(), ids]).encode()]
"""


@pytest.mark.everyday("lmdb-fork")
@pytest.mark.parametrize(
    ("kind", "option"),
    [*((kind, "") for kind in KINDS), ("lmdb", "--lazy-apps")],
    ids=[*(f"{kind}-fork" for kind in KINDS), "lmdb-lazy"],
)
def test_each_process_of_uwsgi_stores_what_it_puts(
    kind: str, option: str, tmp_path: Path
) -> None:  # case M1, law 1
    # given
    program = shutil.which("uwsgi", path=str(Path(sys.executable).parent))
    if program is None:
        lacks("uwsgi is not installed: pip install pyuwsgi")
    url = new_store(kind, tmp_path)
    (tmp_path / "web.py").write_text(APP.format(url=url))
    port = free_port()
    command = [program, "--http-socket", f"127.0.0.1:{port}", "--wsgi-file", "web.py", "--master"]
    command += ["--processes", "4", "--enable-threads", "--die-on-term", *option.split()]
    command += ["--virtualenv", sys.prefix]
    if kind == "rabbitmq":  # its thread may hold the interpreter lock while uWSGI forks
        command.append("--py-call-uwsgi-fork-hooks")

    def ask(_: int) -> tuple[int, list[str]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=LIMIT) as answer:
            pid, ids = json.load(answer)
        return pid, ids

    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, process_group=0)
    try:
        # uWSGI does not end a process that still imports the app.
        eventually(lambda: log.read_text().count(" ready in ") == (4 if option else 1))
        # when
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(REQUESTS)))
    finally:
        try:
            server.terminate()
            server.wait(LIMIT / 2)  # before uWSGI kills what does not end
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    # then
    assert len(Counter(pid for pid, _ in answers)) > 1, log.read_text()
    made = [job_id for _, ids in answers for job_id in ids]
    assert len(set(made)) == 3 * REQUESTS
    with Tidemill(url) as mill:
        messages = iter(lambda: mill.queue("q").get(timeout=0.2), None)
        stored = [message.id for message in messages if message.ack()]
    assert len(stored) == len(set(stored))
    assert len(stored) == 3 * REQUESTS + (4 if option else 1)
    assert set(made) < set(stored)
