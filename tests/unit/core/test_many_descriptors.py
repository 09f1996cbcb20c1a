"""A process with more open files than ``select`` knows: a server with many clients, say."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import eventually
from servers import NETWORK

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner

pytestmark = pytest.mark.everyday("redis", "postgresql")

KINDS = ("memory", "lmdb", *NETWORK)


@pytest.fixture
def many_files() -> Iterator[None]:
    """All descriptors below 1,100 are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
        while (fd := os.open(os.devnull, os.O_RDONLY)) < 1100:
            stack.callback(os.close, fd)
        os.close(fd)
        yield


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_sleeps_and_is_woken(kind: str, tmp_path: Path) -> None:
    url = f"{kind}://{tmp_path}/store" if kind == "lmdb" else "memory://"
    if kind in NETWORK:
        url = NETWORK[kind]("t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        broker.attach(Owner(id="o", name="w"))
        step = Step("o", want=Want(1))
        assert broker.exchange(step).leases == []
        broker.wait("o", 0.01)
        broker.put([Envelope(id="one", task="t")])

        def taken() -> list[str]:
            broker.wait("o", 1.0)
            return [lease.open().id for lease in broker.exchange(step).leases]

        assert eventually(taken, "the job") == ["one"]
