"""A store that processes of several PID namespaces share, as containers with one volume do."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from servers.base import lacks

from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture(autouse=True)
def permitted() -> None:
    if shutil.which("unshare") is None:
        lacks("unshare, which makes PID namespaces, is not installed")
    if subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode:
        lacks("PID namespaces are not permitted here: run the tests as root")


def start(url: str, code: str) -> subprocess.Popen[str]:
    """A process that is number 1 of a PID namespace of its own."""
    prelude = (
        "import os, sys\nfrom tidemill.brokers.contract.exchange import *\n"
        "from tidemill.brokers.contract.inspection import *\n"
        "from tidemill.brokers.registry import open_broker\n"
        "from tidemill.core.job import *\n"
    )
    command = [*NAMESPACE, sys.executable, "-c", prelude + textwrap.dedent(code), url]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


HOLDER = """
    broker = open_broker(sys.argv[1])
    broker.put([Envelope(id="first", task="t")])
    broker.attach(Owner(id="first", name="f"))
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    broker.put([Envelope(id="last", task="t")])
    print(sorted(owner.id for owner in broker.owners()), flush=True)
"""


def test_two_containers_with_one_process_id_are_told_apart_at_once(tmp_path: Path) -> None:
    # given a container whose process 1 has the store open
    url = f"lmdb://{tmp_path}/store"
    with start(url, HOLDER) as first:
        assert first.stdout.readline() == "1\n"
        # when process 1 of another container opens it
        with start(url, "open_broker(sys.argv[1])") as second:
            said = second.communicate(timeout=60)[1].splitlines()[-1]
        # then it is refused with a sentence that says what to do
        assert second.returncode == 1
        assert said.startswith("tidemill.errors.BrokerUnavailable: another process with the ")
        assert "process id 1 has the store" in said
        assert "docker run --pid=container:NAME" in said
        assert "http:// (tidemill server)" in said
        # and the first one is not disturbed
        assert first.communicate("\n", timeout=60)[0] == "['first']\n"
    broker = open_broker(url)
    assert {broker.get(name) is not None for name in ("first", "last")} == {True}
    # and once the first one has ended, the next may come
    with start(url, "open_broker(sys.argv[1]).close()") as third:
        assert third.wait(60) == 0
    broker.close()


def test_containers_with_different_process_ids_share_a_store(tmp_path: Path) -> None:
    # given an owner outside
    url = f"lmdb://{tmp_path}/store"
    broker = open_broker(url)
    broker.put([Envelope(id="outside", task="t")])
    # when a container's process 1 opens the store, too
    with start(url, HOLDER) as inside:
        assert inside.stdout.readline() == "1\n"
        # then each sees the other's jobs and that the other lives
        assert broker.get("first") is not None
        assert [owner.id for owner in broker.owners()] == ["first"]
        inside.communicate("\n", timeout=60)
    assert broker.get("last") is not None
    assert broker.owners() == []
    broker.close()
