"""A closed broker leaves descriptors alone: their numbers may belong to other files by now."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest
from servers import new_store

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.registry import open_broker
from tidemill.brokers.shared.wake_pipe import WakePipe
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner

pytestmark = pytest.mark.everyday("redis", "postgresql", "rabbitmq")

KINDS = ("memory", "lmdb", "redis", "postgresql", "rabbitmq", "http")


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_closes_nothing_for_a_broker_that_was_closed_before(
    kind: str, tmp_path: Path
) -> None:
    # given a broker that had owners here and elsewhere, and was closed
    broker = open_broker(new_store(kind, tmp_path))
    owners = [Owner(id=new_id(), name="here")]
    if Feature.REMOTE_OWNERS in broker.features:
        owners.append(Owner(id=new_id(), name="elsewhere", lease=60.0))
    for owner in owners:
        broker.attach(owner)
        broker.exchange(Step(owner.id, want=Want(1), serial=int(owner.lease > 0)))
        broker.wait(owner.id, 0.0)
    broker.put([Envelope(id="one", task="t")])
    members = getattr(broker, "_owners", None)
    broker.close()
    with contextlib.ExitStack() as stack:
        # and sockets in the place of its descriptors
        pairs = [socket.socketpair() for _ in range(40)]
        socks = [stack.enter_context(sock) for pair in pairs for sock in pair]
        # when
        if members is not None and hasattr(members, "wake_all"):
            members.wake_all()
        child = os.fork()
        if not child:
            try:
                for near, far in pairs:
                    near.send(b"a")
                    assert far.recv(9) == b"a"
                os._exit(0)
            finally:
                os._exit(1)
        # then
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for sock in socks:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):  # nobody has written into it
                sock.recv(1)


def test_a_closed_pipe_neither_writes_nor_closes_again() -> None:
    pipe = WakePipe()
    pipe.wake()
    pipe.drain()
    pipe.close()
    near, far = socket.socketpair()  # on the same numbers
    pipe.wake()
    pipe.close()
    pipe.after_fork_child()
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)
    near.close()
    far.close()


def test_a_pipe_that_is_full_of_wakes_takes_more() -> None:
    pipe = WakePipe()
    threads = [
        threading.Thread(target=lambda: [pipe.wake() for _ in range(30_000)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while True:
        try:
            os.read(pipe.fd, 65536)
        except BlockingIOError:
            break
    pipe.close()


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
def test_an_owner_that_leaves_waits_for_a_wake_up_that_is_under_way(
    kind: str, tmp_path: Path
) -> None:
    # else the wake-up would write to a descriptor that is another file's by then
    broker = open_broker(new_store(kind, tmp_path))
    owner = Owner(id=new_id(), name="here")
    broker.attach(owner)
    local = broker._owners[owner.id]  # type: ignore[attr-defined]
    with local._pipe._lock:
        leaves = threading.Thread(target=local.close)
        leaves.start()
        leaves.join(0.2)
        assert leaves.is_alive()
        assert local._pipe.fd >= 0
    leaves.join(30)
    assert local._pipe.fd == -1
    broker.close()
