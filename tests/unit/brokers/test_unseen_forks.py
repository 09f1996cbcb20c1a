"""A fork in C, as a web server makes it: Python calls no hooks, and the child uses the store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from servers import new_store

KINDS = ("lmdb", "redis", "postgresql", "rabbitmq", "http", "django")

PROGRAM = """
import ctypes, json, os, sys, threading, time
from tidemill import Tidemill

mill = Tidemill(sys.argv[1])
queue = mill.queue("q")
queue.put("the parent's first")

@mill.task
def nothing(n): ...

def put_all(who, count=20):
    ids = [queue.put([who, n]).id for n in range(count)]
    return [*ids, *(job.id for job in queue.put_many([[who, "many", n] for n in range(5)]))]

def fork(run):
    near, far = os.pipe()
    # A child in which a thread of the parent waits for the interpreter lock hangs in Python.
    sys.setswitchinterval(1000)
    time.sleep(0.01)
    pid = ctypes.PyDLL(None).fork()  # PyDLL keeps the interpreter lock, as uWSGI does
    sys.setswitchinterval(0.005)
    if not pid:
        status = 1
        try:
            os.write(far, json.dumps(run()).encode())
            status = 0
        except BaseException as error:
            os.write(far, json.dumps([f"{type(error).__name__}: {error}"]).encode())
        os._exit(status)
    os.close(far)
    return pid, near

def child_of_a_child():
    mine = put_all("child")
    pid, answer = fork(lambda: put_all("grandchild"))
    with open(answer) as file:
        theirs = json.load(file)
    assert os.waitpid(pid, 0)[1] == 0, theirs
    return mine + theirs

def in_a_thread():
    ids = []
    thread = threading.Thread(target=lambda: ids.extend(put_all("thread")))
    thread.start()
    thread.join(60)
    return ids

children = [fork(run) for run in (child_of_a_child, in_a_thread, lambda: put_all("plain"))]
made = put_all("parent")
for pid, answer in children:
    with open(answer) as file:
        ids = json.load(file)
    assert os.waitpid(pid, 0)[1] == 0, ids
    made += ids
found, until = [], time.monotonic() + 30
while len(found) < len(made) + 1 and time.monotonic() < until:
    for message in queue.get_many(100, timeout=1):
        found.append(message.id)
        message.ack()
mill.close()
json.dump([made, found], sys.stdout)
"""


@pytest.mark.everyday
@pytest.mark.full("rabbitmq")
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_of_a_fork_in_c_stores_what_it_puts(kind: str, tmp_path: Path) -> None:
    # case M1, law 1: all that was acknowledged is stored, under ids of its own
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, new_store(kind, tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    made, found = json.loads(ran.stdout)
    assert len(made) == 25 * 5
    assert len(set(made)) == len(made)
    assert len(set(found)) == len(found)
    assert set(made) < set(found)
